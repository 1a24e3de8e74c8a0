"""What a checkpoint on a disk or in an object store is: files, checksums, manifest. Never imports torch."""
