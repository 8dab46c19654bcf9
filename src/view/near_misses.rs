//! Files that people take for checkpoints by their names, and that are none by the rules.
//!
//! In: a name. Out: why it stays as it is. Names of which nobody would expect an image have no reason.

use std::ffi::OsStr;

use crate::checkpoint::CHECKPOINT_EXTENSIONS;

use super::KeepRules;

/// Extensions that checkpoints are given as well as anything else.
const AMBIGUOUS_EXTENSIONS: [&str; 2] = ["pkl", "pickle"];

/// What a checkpoint's extension may be followed by; it never was an archive of that kind.
const ARCHIVE_SUFFIX: &str = ".tar";

/// Why a file that is part of no candidate stays as it is.
pub fn near_miss_reason(name: &OsStr, keep: &KeepRules) -> Option<String> {
    let text = name.to_string_lossy();
    let (stem, last) = text.rsplit_once('.')?;
    let (whole, is_tail) = match text.strip_suffix(ARCHIVE_SUFFIX) {
        Some(whole) => (whole, true),
        None => (&*text, false),
    };
    let extension = whole.rsplit_once('.')?.1;
    let lower = extension.to_ascii_lowercase();
    let is_vague = is_tail || AMBIGUOUS_EXTENSIONS.contains(&&*lower);
    if stem.is_empty()
        || !(CHECKPOINT_EXTENSIONS.contains(&&*lower) || AMBIGUOUS_EXTENSIONS.contains(&&*lower))
    {
        return None;
    }
    if name.to_str().is_none() {
        return Some("its name is not UTF-8, as that of an image would have to be".to_owned());
    }
    if is_vague {
        return Some(format!(
            "what is called .{last} can be anything: give its own path, or rename it, if it is a checkpoint"
        ));
    }
    if lower != extension {
        return Some(format!("called .{extension} and not .{lower}, as checkpoints are"));
    }
    keep.reason(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_take_for_checkpoints() {
        let why = |name: &str| near_miss_reason(name.as_ref(), &KeepRules::new(["my*"]).unwrap());
        for (name, says) in [
            ("a.pkl", "called .pkl"),
            ("a.pickle", "called .pickle"),
            ("a.PKL", "called .PKL"),
            ("a.pth.tar", "called .tar"),
            ("a.PT", "called .PT and not .pt"),
            ("model.SafeTensors", "and not .safetensors"),
            ("optimizer.pt", "optimizer*"),
            ("zero_optim_states.pt", "*_optim_states*"),
            ("my.bin", "my* (--keep)"),
        ] {
            assert!(why(name).is_some_and(|why| why.contains(says)), "{name}: {:?}", why(name));
        }
    }

    #[test]
    fn what_nobody_does() {
        let why =
            |name: &str| near_miss_reason(name.as_ref(), &KeepRules::new(["config*"]).unwrap());
        for name in [
            "config.json",
            "README.md",
            "tokenizer.model",
            "a.gguf",
            "a.tar",
            "data.json.tar",
            "optimizer.txt",
            ".pt",
            ".PT",
            "pt",
            "a.pt.part",
            "",
        ] {
            assert_eq!(why(name), None, "{name}");
        }
    }
}
