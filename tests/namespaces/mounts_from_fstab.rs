//! A line of fstab mounts, and so does every way of mount(8). Options that apply are heeded, those that do
//! not are ignored, and unknown ones are refused.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::command;
use crate::common::command::{ckptfs, install, run_command, run_in_shell};
use crate::common::mounting;
use crate::common::mounting::{MountFixture, wait_until};
use crate::shared;

fn options_in_table(fixture: &MountFixture) -> String {
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    let mut lines = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let line = lines.find(|fields| fields[1] == fixture.mountpoint).unwrap();
    assert_eq!(line[2], "fuse.ckptfs");
    line[3].to_owned()
}

/// The line of docs/cli.md, and the shortest one possible, in a mount namespace in which mount(8) finds the
/// command.
#[test]
fn a_line_of_fstab_mounts() {
    let _shared = shared();
    let fixture = MountFixture::new();
    let folder = fixture.path("bin");
    fs::create_dir(&folder).unwrap();
    install(ckptfs(), format!("{folder}/ckptfs"));
    let script = r#"
        set -e
        mount --bind "$3" /usr/local/bin
        for options in ro,allow_other,memory=64M,_netdev,quiet quiet noauto,nofail,x-systemd.automount,quiet; do
            echo "$1  $2  fuse.ckptfs  $options  0  0" > "$3/fstab"
            case $options in
                noauto*) mount -T "$3/fstab" "$2" ;;
                *) mount -a -T "$3/fstab"; mount -a -T "$3/fstab" ;;
            esac
            grep " $2 " /proc/self/mounts
            cmp "$1/model.safetensors" "$2/model.safetensors"
            # Who looks at it just then keeps it busy for a moment.
            ckptfs unmount "$2"
        done"#;
    let mut shell = Command::new("unshare");
    shell.args(["-m", "bash"]);
    let output = run_in_shell(shell, script, &[&fixture.source, &fixture.mountpoint, &folder]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{}", output.stdout);
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    for line in &lines {
        assert!(line.contains(" fuse.ckptfs ro,nosuid,nodev"), "{line}");
    }
    assert!(lines[0].contains("allow_other") && !lines[1].contains("allow_other"), "{lines:?}");
}

#[test]
fn mount8_mounts_in_each_of_its_ways() {
    let fixture = MountFixture::new();
    let list = "rw,dev,suid,nofail,_netdev,x-systemd.automount,,user=me,users,auto,comment=a=b,defaults,\
        allow_other,memory=64M,keep=a\\,b";
    // As mount.fuse3 runs it: without the word `mount`, and also with relative paths.
    let folder = Path::new(&fixture.source).parent().unwrap();
    for (source, mountpoint) in [(&*fixture.source, &*fixture.mountpoint), ("source", "mnt")] {
        let mut command = Command::new(ckptfs());
        command.args([source, mountpoint, "-o", list]).current_dir(folder);
        let output = run_command(&mut command);
        assert_eq!(output.code, 0, "{}", output.stderr);
        let options = options_in_table(&fixture);
        assert!(options.starts_with("ro,nosuid,nodev") && options.contains("allow_other"));
        assert_eq!(fixture.unmount(&[]).code, 0);
    }
    // And by the programs of libfuse, which look for the command in the system's own places.
    let binary = Path::new(ckptfs()).parent().unwrap().to_str().unwrap();
    let helper = format!(
        r#"PATH="{binary}:$PATH" mount.fuse3 "$1" "$2" -t fuse.ckptfs -o rw,allow_other,threads=3"#
    );
    let named = r#"mount -t fuse "$CKPTFS#$1" "$2" -o allow_other,threads=3"#;
    for script in [&*helper, named] {
        let output =
            run_in_shell(Command::new("bash"), script, &[&fixture.source, &fixture.mountpoint]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        assert!(options_in_table(&fixture).contains("allow_other"));
        // The `status` of another test may use the mount at this moment, and keep it busy.
        let unmount = ["umount", &*fixture.mountpoint];
        wait_until("it is unmounted", || mounting::run_program(&unmount).code == 0);
    }
}

/// mount(8) adds `rw` wherever `ro` is not given. `rw` typed by a user is a request that cannot be met.
#[test]
fn rw_is_taken_from_mount8_alone() {
    let fixture = MountFixture::new();
    let outcome = fixture.try_mount(&["-o", "allow_other,rw"]);
    assert_eq!((outcome.code, fixture.mounts()), (2, 0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("always read-only"), "{}", outcome.stderr);
    let outcome = command::run(&[&fixture.source, &fixture.mountpoint, "-o", "allow_other,rw"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(options_in_table(&fixture).starts_with("ro,"));
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn an_unknown_option_is_refused_with_the_known_ones() {
    let fixture = MountFixture::new();
    for word in ["no_such_thing=5", "rwx", "=x", "help", "auto_unmount"] {
        for arguments in [&["mount"][..], &[]] {
            let list = format!("allow_other,,{word}");
            let place_words = [&fixture.source[..], &fixture.mountpoint, "-o", &list];
            let outcome = command::run(&[arguments, &place_words].concat());
            assert_eq!((outcome.code, fixture.mounts()), (2, 0), "{word}: {}", outcome.stderr);
            assert!(outcome.stderr.contains(&format!("'{word}'")), "{}", outcome.stderr);
            for known in ["allow_other, allow_partial", "show_originals", "_netdev", "nofail"] {
                assert!(outcome.stderr.contains(known), "{}", outcome.stderr);
            }
        }
    }
}
