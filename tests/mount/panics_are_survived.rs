//! A panic in a request gives EIO to that request, one error in the statistics and a line in the log; the mount lives.
//! Debug builds panic on demand, for an attribute.

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

#[test]
fn a_request_that_panics_is_one_error() {
    let fixture = MountFixture::new();
    let foreground = fixture.mount_in_foreground(&["--no-passthrough"]);
    let model = format!("{}/model.safetensors", fixture.mountpoint);
    let errors = || fixture.status().unwrap()["stats"].clone();
    let panicked = rustix::fs::getxattr(&model, "user.ckptfs.panic", &mut [0_u8; 64]);
    assert_eq!(panicked, Err(rustix::io::Errno::IO));
    assert_eq!(errors()["errors"], 1);
    // The next read panics. The kernel may try the page again, and then has it.
    let asked = rustix::fs::getxattr(&model, "user.ckptfs.panic-on-read", &mut [0_u8; 64]);
    assert_eq!(asked, Err(rustix::io::Errno::NODATA));
    let _ = fs::read(&model);
    let stats = errors();
    assert_eq!(stats["errors"], 2, "{stats}");
    let last = &stats["last_errors"][0];
    assert_eq!((&last["count"], &last["errno"]), (&2.into(), &"EIO".into()), "{stats}");
    assert!(last["message"].as_str().unwrap().contains("a fault in ckptfs"), "{stats}");
    assert_eq!(fixture.unmount(&[]).code, 0);
    let (_, messages) = foreground.ends();
    assert_eq!(messages.matches("please report it").count(), 2, "{messages}");
}
