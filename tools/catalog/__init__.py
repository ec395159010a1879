"""What `weenv catalog build` does: tasks of a data set become groups of repositories and init commands of their own."""
