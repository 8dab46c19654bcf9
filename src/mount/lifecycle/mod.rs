//! The life of a mount: attached to the tree, served by a session, probed from other processes, and taken away.

pub mod attach;
pub mod daemon;
pub mod fusermount;
pub mod liveness;
pub mod mount_states;
pub mod mountpoint;
pub mod respawn;
pub mod session;
pub mod stale_mounts;
pub mod stuck_paths;
pub mod superblock;
