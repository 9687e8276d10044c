"""Decisions of Pivot: pure, typed Python on the controller, used by thin Ansible plugins."""
