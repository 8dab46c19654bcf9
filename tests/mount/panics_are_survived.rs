//! A panic in a request gives EIO to that request and a line in the log; the mount lives. Debug builds panic
//! on demand, for one attribute.

#![cfg(all(feature = "mount", debug_assertions))]

use std::fs;

use crate::common::mounting::MountFixture;

#[test]
fn a_request_that_panics_is_answered_with_eio() {
    let fixture = MountFixture::new();
    let foreground = fixture.mount_in_foreground(&["--threads", "1"]);
    let model = format!("{}/model.safetensors", fixture.mountpoint);
    for path in [&model, &fixture.mountpoint] {
        // More often than there are threads.
        for _ in 0..10 {
            let panicked = rustix::fs::getxattr(path, "user.ckptfs.panic", &mut [0_u8; 64]);
            assert_eq!(panicked, Err(rustix::io::Errno::IO));
        }
    }
    assert_eq!(fs::read(&model).unwrap().last(), Some(&62));
    fixture.wait_until_alive();
    assert_eq!(fixture.unmount(&[]).code, 0);
    let (status, messages) = foreground.ends();
    assert_eq!(status.code(), Some(0));
    assert_eq!(messages.matches("please report it").count(), 20, "{messages}");
}
