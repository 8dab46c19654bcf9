"""`ckptfs bench`: how fast a checkpoint loads, with ckptfs and with other libraries."""

# What starts the clock of a prepared workload: see `worker`.
GO = "go"
