//! Names of shards and of indexes.

use std::fmt;

/// Extensions of files that can be checkpoints.
pub const CHECKPOINT_EXTENSIONS: [&str; 6] = ["safetensors", "sft", "bin", "pt", "pth", "ckpt"];

/// A parsed name of a shard: `stem-00001-of-00002.ext`, or with a variant before the extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShardName<'a> {
    stem: &'a str,
    digits: usize,
    pub number: u64,
    pub total: u64,
    variant: &'a str,
    extension: &'a str,
}

impl<'a> ShardName<'a> {
    pub fn parse(name: &'a str) -> Option<Self> {
        let (rest, extension) = name.rsplit_once('.')?;
        let (before, after) = rest.rsplit_once("-of-")?;
        let (total, variant) = after.split_once('.').unwrap_or((after, ""));
        let (stem, number) = before.rsplit_once('-')?;
        let is_number =
            |s: &str| (3..=8).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_digit());
        if stem.is_empty()
            || !CHECKPOINT_EXTENSIONS.contains(&extension)
            || !is_number(number)
            || !is_number(total)
            || number.len() != total.len()
            || total.bytes().all(|b| b == b'0')
        {
            return None;
        }
        let digits = number.len();
        let (number, total) = (number.parse().ok()?, total.parse().ok()?);
        Some(ShardName { stem, digits, number, total, variant, extension })
    }

    /// The name that all shards together would have as one file.
    pub fn unsharded_name(&self) -> String {
        let ShardName { stem, variant, extension, .. } = self;
        if variant.is_empty() {
            format!("{stem}.{extension}")
        } else {
            format!("{stem}.{variant}.{extension}")
        }
    }

    /// What all shards of the set share: everything except for the number.
    pub fn without_number(self) -> Self {
        ShardName { number: 0, ..self }
    }

    /// The name of another shard of the set.
    pub fn with_number(&self, number: u64) -> String {
        self.with_digits(&format!("{number:0digits$}", digits = self.digits))
    }

    /// The name with other text in the place of the number.
    pub fn with_digits(&self, number: &str) -> String {
        let ShardName { stem, digits, total, variant, extension, .. } = self;
        let variant = if variant.is_empty() { String::new() } else { format!(".{variant}") };
        format!("{stem}-{number}-of-{total:0digits$}{variant}.{extension}")
    }
}

/// A note for a file that is read alone although its name is that of a shard.
pub fn lone_shard_note(name: &str) -> Option<String> {
    let ShardName { number, total, .. } = ShardName::parse(name).filter(|shard| shard.total > 1)?;
    Some(format!("this is only shard {number} of {total}; give the directory for all of them"))
}

/// The name of the single file that an index (`X.ext.index.json`, `X.ext.index.variant.json`) stands for.
pub fn unsharded_name_of_index(name: &str) -> Option<String> {
    let rest = name.strip_suffix(".json")?;
    let (unsharded, variant) = match rest.strip_suffix(".index") {
        Some(unsharded) => (unsharded, None),
        None => {
            rest.rsplit_once(".index.").map(|(unsharded, variant)| (unsharded, Some(variant)))?
        }
    };
    let (stem, extension) = unsharded.rsplit_once('.')?;
    if stem.is_empty() || !CHECKPOINT_EXTENSIONS.contains(&extension) {
        return None;
    }
    Some(match variant {
        None => unsharded.to_owned(),
        Some(variant) => format!("{stem}.{variant}.{extension}"),
    })
}

/// Whether a name has an extension of checkpoints. A name without a stem does not count.
pub fn has_checkpoint_extension(name: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(stem, e)| !stem.is_empty() && CHECKPOINT_EXTENSIONS.contains(&e))
}

/// Whether a name is that of a shard of a set.
pub fn is_shard_of(name: &str, unsharded_name: &str) -> bool {
    ShardName::parse(name).is_some_and(|shard| shard.unsharded_name() == unsharded_name)
}

/// The names of a set's shards, sorted.
pub fn numbered_shards(names: &[String], unsharded_name: &str) -> Vec<String> {
    let mut numbered: Vec<String> =
        names.iter().filter(|name| is_shard_of(name, unsharded_name)).cloned().collect();
    numbered.sort();
    numbered
}

/// Whether sorted names are exactly one complete set: no shard is missing, and none is left over from another set.
pub fn is_complete_set(names: &[String]) -> bool {
    let parsed: Option<Vec<ShardName>> = names.iter().map(|name| ShardName::parse(name)).collect();
    let Some([first, rest @ ..]) = parsed.as_deref() else { return false };
    let is_next =
        |(n, shard): (u64, &ShardName)| *shard == ShardName { number: first.number + n, ..*first };
    first.number <= 1 && names.len() as u64 == first.total && (1..).zip(rest).all(is_next)
}

/// The name of a safetensors file that torch.distributed.checkpoint wrote for a rank:
/// `shard-00001-model-00001-of-00002.safetensors`. All numbers count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DcpShardName {
    pub rank: u64,
    /// The part of the model that the file belongs to, and the number of parts.
    pub part: u64,
    pub parts: u64,
}

impl DcpShardName {
    pub fn parse(name: &str) -> Option<DcpShardName> {
        let number = |text: &str| -> Option<u64> {
            let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        let (rank, rest) =
            name.strip_suffix(".safetensors")?.strip_prefix("shard-")?.split_once("-model-")?;
        let (part, parts) = rest.split_once("-of-")?;
        Some(DcpShardName { rank: number(rank)?, part: number(part)?, parts: number(parts)? })
    }
}

impl fmt::Display for DcpShardName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DcpShardName { rank, part, parts } = self;
        write!(f, "shard-{rank:05}-model-{part:05}-of-{parts:05}.safetensors")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_of_every_spelling_are_parsed() {
        let parse = |name| ShardName::parse(name).map(|s| (s.unsharded_name(), s.number, s.total));
        assert_eq!(
            parse("model-00001-of-00003.safetensors"),
            Some(("model.safetensors".into(), 1, 3))
        );
        assert_eq!(
            parse("model.fp16-00002-of-00003.safetensors"),
            Some(("model.fp16.safetensors".into(), 2, 3))
        );
        assert_eq!(
            parse("model-00002-of-00003.fp16.safetensors"),
            Some(("model.fp16.safetensors".into(), 2, 3))
        );
        assert_eq!(
            parse("pytorch_model-00001-of-00002.bin"),
            Some(("pytorch_model.bin".into(), 1, 2))
        );
        assert_eq!(parse("model.safetensors"), None);
        assert_eq!(parse("one-of-many.safetensors"), None);
        assert_eq!(parse("-00001-of-00002.bin"), None);
    }

    #[test]
    fn a_parsed_shard_name_formats_to_itself() {
        for name in
            ["a-00001-of-00002.bin", "a.fp16-00001-of-00002.bin", "a-00001-of-00002.fp16.bin"]
        {
            let shard = ShardName::parse(name).unwrap();
            assert_eq!(shard.with_number(shard.number), name);
        }
    }

    #[test]
    fn index_names_of_every_spelling_are_parsed() {
        assert_eq!(
            unsharded_name_of_index("model.safetensors.index.json").as_deref(),
            Some("model.safetensors")
        );
        assert_eq!(
            unsharded_name_of_index("model.safetensors.index.fp16.json").as_deref(),
            Some("model.fp16.safetensors")
        );
        assert_eq!(
            unsharded_name_of_index("model.fp16.safetensors.index.json").as_deref(),
            Some("model.fp16.safetensors")
        );
        assert_eq!(
            unsharded_name_of_index("pytorch_model.bin.index.json").as_deref(),
            Some("pytorch_model.bin")
        );
        assert_eq!(unsharded_name_of_index("config.json"), None);
        assert_eq!(unsharded_name_of_index("notes.index.json"), None);
    }
}
