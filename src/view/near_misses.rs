//! Files whose names people take for those of checkpoints, and why they stay as they are by the rules.

use std::ffi::OsStr;

use crate::checkpoint::CHECKPOINT_EXTENSIONS;

use super::options::KeepRules;

/// Extensions that checkpoints are given as well as anything else.
const AMBIGUOUS_EXTENSIONS: [&str; 2] = ["pkl", "pickle"];

/// What may follow a checkpoint's extension although the file is no archive of that kind.
const ARCHIVE_SUFFIX: &str = ".tar";

/// Why a file that is part of no candidate stays as it is; `None` if nobody would take it for a checkpoint.
pub fn near_miss_reason(name: &OsStr, keep: &KeepRules) -> Option<String> {
    let text = name.to_string_lossy();
    let (stem, last) = text.rsplit_once('.')?;
    let (base, has_suffix) = match text.strip_suffix(ARCHIVE_SUFFIX) {
        Some(base) => (base, true),
        None => (&*text, false),
    };
    let extension = base.rsplit_once('.')?.1;
    let lower = extension.to_ascii_lowercase();
    let is_ambiguous = AMBIGUOUS_EXTENSIONS.contains(&&*lower);
    if stem.is_empty() || !(is_ambiguous || CHECKPOINT_EXTENSIONS.contains(&&*lower)) {
        return None;
    }
    if name.to_str().is_none() {
        return Some("its name is not UTF-8, and that of a virtual file must be".to_owned());
    }
    if has_suffix || is_ambiguous {
        return Some(format!(
            "a file called .{last} can be anything: if it is a checkpoint, give its own path or rename it"
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
    fn names_like_those_of_checkpoints_have_a_reason() {
        let reason =
            |name: &str| near_miss_reason(name.as_ref(), &KeepRules::new(["my*"]).unwrap());
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
            assert!(
                reason(name).is_some_and(|reason| reason.contains(says)),
                "{name}: {:?}",
                reason(name)
            );
        }
    }

    #[test]
    fn other_names_have_none() {
        let reason =
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
            assert_eq!(reason(name), None, "{name}");
        }
    }
}
