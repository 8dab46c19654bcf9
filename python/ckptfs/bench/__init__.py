"""`ckptfs bench`: how fast a checkpoint loads, with ckptfs and with other libraries."""
