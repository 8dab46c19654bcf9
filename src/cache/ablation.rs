//! Leaves single policies of readahead out, so that `scripts/bench/run ablations` can measure what each wins.
//!
//! Only builds with the feature `ablation` can do that. In all others, every policy is in.

/// Whether the variable `CKPTFS_LEAVE_OUT` names a policy.
#[cfg(feature = "ablation")]
pub fn is_left_out(policy: &str) -> bool {
    static LEFT_OUT: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let names = LEFT_OUT.get_or_init(|| std::env::var("CKPTFS_LEAVE_OUT").unwrap_or_default());
    names.split(',').any(|name| name == policy)
}

#[cfg(not(feature = "ablation"))]
pub const fn is_left_out(_policy: &str) -> bool {
    false
}
