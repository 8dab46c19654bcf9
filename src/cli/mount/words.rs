//! The command line of `mount` before it is parsed: what mount(8) calls, and its `-o` lists.
//!
//! In: the arguments of the process. Out: the same with `mount` in front where mount(8) leaves it
//! out, and each `-o` word as the long option that it stands for.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use clap::{Arg, Command};

/// `mount -t fuse.ckptfs SOURCE MOUNTPOINT` runs `ckptfs SOURCE MOUNTPOINT -o …`. Whether a first
/// argument that is no command is such a source.
pub fn is_from_mount8(args: &[OsString], commands: &Command) -> bool {
    let [_, source, mountpoint, ..] = args else {
        return false;
    };
    let name = source.as_bytes();
    !name.starts_with(b"-")
        && !mountpoint.as_bytes().starts_with(b"-")
        && commands.find_subcommand(source).is_none()
        && (name.contains(&b'/') || exists(source))
}

/// Whether a path is there, without asking the daemon of a mount that may be dead or stuck.
fn exists(path: &OsStr) -> bool {
    crate::mount::table::Spot::at(path.as_ref()).is_ok()
}

/// Words of mount(8), fstab and mount.fuse3 that say nothing to us. The mount is always read-only,
/// nosuid and nodev, so what they ask for is so or cannot be.
const IGNORED: [&str; 38] = [
    "defaults",
    "rw",
    "ro",
    "dev",
    "nodev",
    "suid",
    "nosuid",
    "exec",
    "noexec",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "async",
    "sync",
    "dirsync",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "default_permissions",
    "silent",
    "loud",
    "comment",
    "subtype",
    "fsname",
    "setuid",
];

/// Long options that are not for lists: they ask for text instead of a mount.
const NOT_FOR_LISTS: [&str; 2] = ["help", "version"];

/// The long options that `-o` lists stand for, or the word that is none.
pub fn long_options(lists: &[OsString], mount: &Command) -> Result<Vec<OsString>, OsString> {
    let mut found = Vec::new();
    for list in lists {
        for word in split(list.as_bytes()) {
            let (name, value) = match word.iter().position(|&byte| byte == b'=') {
                Some(at) => (&word[..at], Some(&word[at + 1..])),
                None => (&word[..], None),
            };
            let name = String::from_utf8_lossy(name);
            if name.is_empty()
                || name.starts_with("x-")
                || name.starts_with("X-")
                || IGNORED.contains(&&*name)
            {
                continue;
            }
            let long = name.replace('_', "-");
            let known = |arg: &&Arg| arg.get_long() == Some(long.as_str());
            if NOT_FOR_LISTS.contains(&long.as_str()) || mount.get_arguments().find(known).is_none()
            {
                return Err(OsString::from_vec(word));
            }
            let mut option = format!("--{long}").into_bytes();
            if let Some(value) = value {
                option.push(b'=');
                option.extend(value);
            }
            found.push(OsString::from_vec(option));
        }
    }
    Ok(found)
}

/// The words of a list; a backslash takes a comma or a backslash as it is.
fn split(list: &[u8]) -> Vec<Vec<u8>> {
    let mut words = vec![Vec::new()];
    let mut bytes = list.iter();
    while let Some(&byte) = bytes.next() {
        let (byte, is_end) = match byte {
            b',' => (byte, true),
            b'\\' => (bytes.next().copied().unwrap_or(byte), false),
            _ => (byte, false),
        };
        if is_end {
            words.push(Vec::new());
        } else if let Some(word) = words.last_mut() {
            word.push(byte);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::super::super::args;
    use super::*;
    use clap::CommandFactory;

    fn options(lists: &[&str]) -> Result<Vec<String>, OsString> {
        let lists: Vec<OsString> = lists.iter().map(OsString::from).collect();
        let found = long_options(&lists, &args::Mount::command())?;
        Ok(found.into_iter().map(|option| option.into_string().unwrap()).collect())
    }

    #[test]
    fn every_long_option_can_stand_in_a_list_in_both_spellings() {
        let mut command = args::Mount::command();
        command.build();
        let longs: Vec<String> = command
            .get_arguments()
            .filter_map(|arg| arg.get_long().map(str::to_owned))
            .filter(|long| !NOT_FOR_LISTS.contains(&long.as_str()))
            .collect();
        assert!(longs.len() >= 17, "{longs:?}");
        for long in longs {
            let expected = vec![format!("--{long}")];
            assert_eq!(options(&[&long]).unwrap(), expected);
            assert_eq!(options(&[&long.replace('-', "_")]).unwrap(), expected);
        }
    }

    #[test]
    fn words_of_mount8_are_no_options() {
        let list = "rw,nosuid,dev,,x-systemd.automount,_netdev,comment=a=b,fsname=x,uid=5,nofail";
        assert_eq!(options(&[list]).unwrap(), ["--uid=5"]);
        for unknown in ["rwx", "help", "version", "o", "-f", "=", "Memory=1G"] {
            let found = options(&[unknown]);
            assert!(found == Err(unknown.into()) || unknown == "=", "{unknown}: {found:?}");
        }
    }

    #[test]
    fn a_backslash_keeps_a_comma() {
        let list = r"keep=a\,b\\c,keep=d=e,root=m";
        assert_eq!(options(&[list]).unwrap(), [r"--keep=a,b\c", "--keep=d=e", "--root=m"]);
        assert_eq!(options(&[r"keep=a\"]).unwrap(), [r"--keep=a\"]);
    }
}
