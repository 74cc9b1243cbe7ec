"""Plain specifications of the ops in readable torch and numpy: the oracles of the tests."""
