"""The format of a checkpoint, without torch: manifest, safetensors files, folders of steps; verify, diff and export."""
