"""Jobs: the supervisor of `shoal run`, the directory of a job, and what finds and stops one."""
