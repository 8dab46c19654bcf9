//! The `ckptfs` command.
fn main() {}
