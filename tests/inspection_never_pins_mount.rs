//! In a process of its own, because it asks every mount of the machine without a pause.
//!
//! A command that only inspects a mount does not keep it from being unmounted.

#![cfg(feature = "mount")]
#![allow(clippy::unwrap_used)] // In functions of tests too: what fails fails the test.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::command::run;
use common::mounting::MountFixture;

/// Who asks all mounts for their numbers uses each for a moment, which is not the use that counts.
#[test]
fn being_looked_at_keeps_no_mount() {
    let place = MountFixture::new();
    let looks = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while looks.load(Ordering::Relaxed) {
                    assert_eq!(run(&["status"]).code, 0);
                }
            });
        }
        let all: Vec<i32> =
            (0..20).flat_map(|_| [place.try_mount(&[]).code, place.unmount(&[]).code]).collect();
        looks.store(false, Ordering::Relaxed);
        assert_eq!(all, [0; 40]);
    });
}
