//! In a process of its own, because it asks every mount of the machine without a pause.
//!
//! A command that only inspects a mount does not keep it from being unmounted.

#![cfg(feature = "mount")]
#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::command::run;
use common::mounting::MountFixture;

/// Each `status` uses every mount for a moment, which must not count as use.
#[test]
fn status_never_keeps_a_mount_busy() {
    let fixture = MountFixture::new();
    let looks = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while looks.load(Ordering::Relaxed) {
                    assert_eq!(run(&["status"]).code, 0);
                }
            });
        }
        let all: Vec<i32> = (0..20)
            .flat_map(|_| [fixture.try_mount(&[]).code, fixture.unmount(&[]).code])
            .collect();
        looks.store(false, Ordering::Relaxed);
        assert_eq!(all, [0; 40]);
    });
}
