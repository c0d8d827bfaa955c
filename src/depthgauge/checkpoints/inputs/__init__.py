"""The kinds of inputs that `--data` names: how each is found, which models read it, and how it becomes windows."""
