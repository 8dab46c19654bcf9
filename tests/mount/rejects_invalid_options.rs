//! An option's value that cannot work is refused before anything is mounted, with the least or the greatest
//! value that can.

use std::fs;
use std::path::Path;

use crate::common::command::{run, write_model};
use crate::common::mounting::MountFixture;

#[test]
fn the_message_has_the_limit() {
    let fixture = MountFixture::new();
    let cases: [(&[&str], &str); 25] = [
        (&["--memory", "0"], "at least 16M"),
        (&["--memory", "5"], "at least 16M"),
        (&["--memory", "16383K"], "at least 16M"),
        (&["--memory", "1000T"], "at most"),
        (&["-o", "memory=1M"], "at least 16M"),
        (&["-o", "memory=much"], "--memory"),
        (&["-o", "memory"], "'memory' in -o needs a value: memory=..."),
        (&["-o", "ro,log_file="], "'log_file' in -o needs a value"),
        (&["--memory", "99999999999999999999"], "at most"),
        (&["--memory", "G"], "a size begins with a number"),
        (
            &["-o", "remount,memory=1G"],
            "unmount it (ckptfs unmount MOUNTPOINT), and mount it again",
        ),
        (&["--readahead", "99999999999999999999"], "at most"),
        (&["--memory", "-1"], "-1"),
        (&["--readahead", "5"], "at least 1M, or 0 to disable it"),
        (&["--readahead", "1000T"], "at most"),
        (&["--threads", "0"], "1..=256"),
        (&["--threads", "100000"], "1..=256"),
        (&["--uid", "4294967295"], "0..4294967295"),
        (&["--gid", "-1"], "-1"),
        (&["--uid", "me"], "--uid"),
        (&["-o", "allow_other=yes"], "--allow-other"),
        (&["--keep", "[a"], "not a pattern"),
        (&["--metrics", "0.0.0.0:9100"], "only a loopback address"),
        (&["-o", "metrics=0.0.0.0:9100"], "only a loopback address"),
        (&["--no-such-flag"], "--no-such-flag"),
    ];
    for (options, words) in cases {
        let outcome = fixture.try_mount(options);
        assert_eq!((outcome.code, fixture.mounts()), (2, 0), "{options:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(words), "{options:?}: {}", outcome.stderr);
    }
    // A word that is neither a command nor a path is not taken for a source.
    let outcome = run(&["mnt", &fixture.mountpoint]);
    assert_eq!(outcome.code, 2);
    assert!(outcome.stderr.contains("unrecognized subcommand"), "{}", outcome.stderr);
}

/// A file larger than every window and the least budget together.
#[test]
fn the_limits_themselves_work() {
    let fixture = MountFixture::new();
    let file = Path::new(&fixture.source).join("model.safetensors");
    write_model(&file, 3, 9 << 20);
    let bytes = fs::read(&file).unwrap();
    let seen = Path::new(&fixture.mountpoint).join("model.safetensors");
    for options in [
        &["--memory", "16M", "--readahead", "0", "--threads", "1"][..],
        &["--memory", "16M", "--readahead", "1M", "--threads", "256"],
    ] {
        fixture.mount(&[options, &["--no-passthrough"]].concat());
        assert!(fs::read(&seen).unwrap() == bytes, "{options:?}");
        assert_eq!(fixture.unmount(&[]).code, 0);
    }
    // A dedicated option overrides `-o`.
    fixture.mount(&["--threads=2", "-o", "threads=3", "-o", "ro,memory=64M,no-passthrough"]);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn zero_readahead_reads_nothing_ahead() {
    let fixture = MountFixture::new();
    let file = Path::new(&fixture.source).join("model.safetensors");
    write_model(&file, 3, 9 << 20);
    fixture.mount(&["--readahead", "0", "--no-passthrough"]);
    fs::read(Path::new(&fixture.mountpoint).join("model.safetensors")).unwrap();
    let mount = fixture.status().unwrap();
    assert!(mount["stats"]["bytes_served"].as_u64().unwrap() > 27 << 20, "{mount}");
    assert_eq!(mount["stats"]["prefetch"]["fetched"], 0, "{mount}");
    assert_eq!(fixture.unmount(&[]).code, 0);
}
