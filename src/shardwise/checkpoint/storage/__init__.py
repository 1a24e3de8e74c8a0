"""Places on a disk or in an object store: root and chunks for bytes, step_folders for checkpoints, find_checkpoint.

root               a file or folder of a filesystem, and the operations on it
chunks             files with a checksum for each chunk
step_folders       the checkpoints in a folder, and those that may be removed
run_identity       the run that checkpoints belong to, and the run that a folder holds
find_checkpoint    from a path or URL of the user to a folder
fetch              copies of remote files
"""
