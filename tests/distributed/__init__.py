"""Several gloo processes on this machine against one."""
