//! The command line as mount(8) and fstab write it: no command word, and options in `-o` lists.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use clap::{Arg, Command};

/// Whether mount(8) runs this process: `mount -t fuse.ckptfs SOURCE MOUNTPOINT` runs `ckptfs SOURCE MOUNTPOINT -o …`.
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

/// Whether a path exists, without asking the daemon of a mount that may be dead or stuck.
fn exists(path: &OsStr) -> bool {
    crate::mount_info::mountinfo::PathHandle::open(path.as_ref()).is_ok()
}

/// Options of mount(8), fstab and mount.fuse3 that are ignored: a mount is always read-only, nosuid and nodev.
const IGNORED_OPTIONS: [&str; 37] = [
    "defaults",
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

/// Long options that no list may hold: they ask for text instead of a mount.
const EXCLUDED_OPTIONS: [&str; 2] = ["help", "version"];

/// The error of a `-o` list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionListError {
    /// An unknown option, and the options that there are.
    #[error(
        "unknown mount option '{word}' in -o; options: {options}; ignored, as in fstab: defaults, ro, auto, noauto, \
             user, users, nofail, _netdev, comment=..., x-..., and the like"
    )]
    Unknown { word: String, options: String },
    /// The list asks for a writable mount.
    #[error("'rw' in -o: a mount is always read-only; leave it out")]
    Writable,
    /// The list asks to change an existing mount.
    #[error(
        "'remount' in -o: a mount of ckptfs cannot be changed while it is there; unmount it (ckptfs unmount MOUNTPOINT), and mount it again"
    )]
    Remount,
    /// An option lacks its value.
    #[error("'{word}' in -o needs a value: {word}=...")]
    NoValue { word: String },
}

/// The long options that `-o` lists stand for.
///
/// mount(8) adds `rw` unless the user wrote `ro`, so from there it is ignored. Otherwise it is an error.
pub fn long_options(
    lists: &[OsString],
    mount: &Command,
    from_mount8: bool,
) -> Result<Vec<OsString>, OptionListError> {
    let is_option = |long: &str| !EXCLUDED_OPTIONS.contains(&long);
    let unknown = |word: Vec<u8>| {
        let longs = mount.get_arguments().filter_map(Arg::get_long).filter(|long| is_option(long));
        let mut options: Vec<String> = longs.map(|long| long.replace('-', "_")).collect();
        options.sort();
        let word = String::from_utf8_lossy(&word).into_owned();
        OptionListError::Unknown { word, options: options.join(", ") }
    };
    let mut options = Vec::new();
    for list in lists {
        for word in split_list(list.as_bytes()) {
            let (name, value) = match word.iter().position(|&byte| byte == b'=') {
                Some(at) => (&word[..at], Some(&word[at + 1..])),
                None => (&word[..], None),
            };
            let name = String::from_utf8_lossy(name);
            if name == "rw" && value.is_none() && !from_mount8 {
                return Err(OptionListError::Writable);
            }
            if name == "remount" && value.is_none() {
                return Err(OptionListError::Remount);
            }
            if word.is_empty()
                || name == "rw"
                || name.starts_with("x-")
                || name.starts_with("X-")
                || IGNORED_OPTIONS.contains(&&*name)
            {
                continue;
            }
            let long = name.replace('_', "-");
            let is_named = |arg: &&Arg| arg.get_long() == Some(long.as_str());
            let Some(option) = mount.get_arguments().find(is_named).filter(|_| is_option(&long))
            else {
                return Err(unknown(word));
            };
            // Otherwise clap would take the next argument for its value.
            if value.is_none_or(<[u8]>::is_empty) && option.get_action().takes_values() {
                return Err(OptionListError::NoValue { word: name.into_owned() });
            }
            let mut option = format!("--{long}").into_bytes();
            if let Some(value) = value {
                option.push(b'=');
                option.extend(value);
            }
            options.push(OsString::from_vec(option));
        }
    }
    Ok(options)
}

/// Splits a list at commas. A backslash escapes a comma or a backslash.
fn split_list(list: &[u8]) -> Vec<Vec<u8>> {
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
    use super::*;
    use crate::cli::args;
    use clap::CommandFactory;

    fn options(lists: &[&str]) -> Result<Vec<String>, OptionListError> {
        let lists: Vec<OsString> = lists.iter().map(OsString::from).collect();
        let found = long_options(&lists, &args::MountArgs::command(), true)?;
        Ok(found.into_iter().map(|option| option.into_string().unwrap()).collect())
    }

    #[test]
    fn every_long_option_can_stand_in_a_list_in_both_spellings() {
        let mut command = args::MountArgs::command();
        command.build();
        let longs: Vec<(String, bool)> = command
            .get_arguments()
            .filter_map(|arg| Some((arg.get_long()?.to_owned(), arg.get_action().takes_values())))
            .filter(|(long, _)| !EXCLUDED_OPTIONS.contains(&long.as_str()))
            .collect();
        assert!(longs.len() >= 17, "{longs:?}");
        for (long, takes_value) in longs {
            for word in [long.clone(), long.replace('-', "_")] {
                let no_value = OptionListError::NoValue { word: word.clone() };
                for missing in [word.clone(), format!("{word}=")] {
                    let is_refused = options(&[&missing]) == Err(no_value.clone());
                    assert_eq!(is_refused, takes_value, "{missing}");
                }
                let value = if takes_value { "=x" } else { "" };
                let expected = vec![format!("--{long}{value}")];
                assert_eq!(options(&[&format!("{word}{value}")]).unwrap(), expected);
            }
        }
    }

    #[test]
    fn words_of_mount8_are_no_options() {
        let list = "rw,nosuid,dev,,x-systemd.automount,_netdev,comment=a=b,fsname=x,uid=5,nofail";
        assert_eq!(options(&[list]).unwrap(), ["--uid=5"]);
        for unknown in ["rwx", "help", "version", "o", "-f", "=", "=x", " ", "Memory=1G"] {
            match options(&["ro", unknown]) {
                Err(OptionListError::Unknown { word, options }) => {
                    assert_eq!(word, unknown);
                    assert!(options.starts_with("allow_http, allow_other, "), "{options}");
                    assert!(!options.contains("help"), "{options}");
                }
                other => panic!("{unknown}: {other:?}"),
            }
        }
    }

    #[test]
    fn only_mount8_may_say_rw() {
        let list = ["ro,memory=1G,rw".into()];
        let found = |from_mount8| long_options(&list, &args::MountArgs::command(), from_mount8);
        assert_eq!(found(true), Ok(vec!["--memory=1G".into()]));
        assert_eq!(found(false), Err(OptionListError::Writable));
    }

    #[test]
    fn a_backslash_keeps_a_comma() {
        let list = r"keep=a\,b\\c,keep=d=e,root=m";
        assert_eq!(options(&[list]).unwrap(), [r"--keep=a,b\c", "--keep=d=e", "--root=m"]);
        assert_eq!(options(&[r"keep=a\"]).unwrap(), [r"--keep=a\"]);
    }
}
