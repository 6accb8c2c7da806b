"""How traces and runs are shown."""
