"""The values of every config group, read by Hydra as ``pkg://dejavu.conf``. Holds no code."""
