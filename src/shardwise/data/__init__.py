"""Data: text becomes tokens once, and tokens become the same batches at any layout. Nothing here imports torch."""
