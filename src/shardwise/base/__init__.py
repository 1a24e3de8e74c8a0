"""Tools of all rooms, without torch.

- `errors`: what ends a command, and the words of messages
- `units`: numbers as people read them, such as `1.5 GiB`
- `yaml_and_json`: YAML and JSON that anybody may have written
- `files`: files on a local disk; names from outside
- `redaction`: texts without secrets
- `hardware`: accelerators, memory and CPUs of this machine
- `mesh_axes`, `tensor_box`: the axes along which ranks are arranged; rectangles in tensors
- `user_code`, `registered`: objects of the user's own; packages that can be called
"""
