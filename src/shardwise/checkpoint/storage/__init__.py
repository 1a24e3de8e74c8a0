"""Places on a disk or in an object store: root and chunks for bytes, checkpoint_folders for checkpoints.

root               a file or folder of a filesystem, and the operations on it
chunks             files with a checksum for each chunk
checkpoint_folders the checkpoints in a folder, those that may be removed, and those that a user's path stands for
run_identity       the run that checkpoints belong to, and the run that a folder holds
fetch              copies of remote files
"""
