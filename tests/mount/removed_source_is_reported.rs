//! A mount whose source directory was removed, or removed and made again, shows nothing. It says why once in
//! the log, and in its statistics.

use std::fs;
use std::path::Path;

use crate::common::command::{names_in, run, write_model};
use crate::common::mounting::MountFixture;

#[test]
fn reported_once_in_the_log_and_in_the_statistics() {
    let fixture = MountFixture::new();
    let log = fixture.path("log");
    let mountpoint = Path::new(&fixture.mountpoint);
    fixture.mount(&["--log-file", &log]);
    let is_removed = || fixture.status().unwrap()["stats"]["source_removed"].as_bool().unwrap();
    assert_eq!(names_in(mountpoint), ["model.safetensors"]);
    // An empty source is still there.
    fs::remove_file(Path::new(&fixture.source).join("model.safetensors")).unwrap();
    assert!(!mountpoint.join("other.safetensors").exists());
    assert!(!is_removed());
    assert_eq!(fs::read_to_string(&log).unwrap(), "");

    fs::remove_dir_all(&fixture.source).unwrap();
    fs::create_dir(&fixture.source).unwrap();
    write_model(&Path::new(&fixture.source).join("model.safetensors"), 2, 8);
    // One lookup that finds nothing is enough for the log line.
    assert!(!mountpoint.join("another.safetensors").exists());
    let messages = fs::read_to_string(&log).unwrap();
    assert!(messages.contains("WARN") && messages.contains(&fixture.source), "{messages}");
    assert!(messages.contains("was removed") && messages.contains("mount again"), "{messages}");
    assert!(!mountpoint.join("a third").exists());
    assert_eq!(names_in(mountpoint), [""; 0]);
    assert!(is_removed());
    let table = run(&["status"]).stdout;
    let place = table.find(&format!("{}\n", fixture.mountpoint)).unwrap();
    assert!(table[place..].contains("REMOVED: the mount stays empty"), "{table}");
    assert_eq!(fs::read_to_string(&log).unwrap(), messages);

    // Mounting again helps.
    assert_eq!(fixture.unmount(&[]).code, 0);
    fixture.mount(&[]);
    assert_eq!(names_in(mountpoint), ["model.safetensors"]);
    assert!(!is_removed());
    assert_eq!(fixture.unmount(&[]).code, 0);
}
