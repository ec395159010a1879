"""What will go wrong in a plan, seen before it is used: `weenv group check`. Reads metadata, and contents only of git
repositories.
"""
