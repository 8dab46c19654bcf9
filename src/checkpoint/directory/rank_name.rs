//! The names of files that each rank of a run writes.

/// Splits `X_rank_3.pt` or `X_rank3.bin` into `X_rank_` and 3.
pub fn split_rank(name: &str) -> Option<(&str, u32)> {
    let (stem, _) = name.rsplit_once('.')?;
    let digits = stem.bytes().rev().take_while(u8::is_ascii_digit).count();
    let (stem, number) = stem.split_at(stem.len() - digits);
    stem.trim_end_matches(['_', '-']).strip_suffix("rank")?;
    Some((stem, number.parse().ok()?))
}

/// The number of ranks in `model_world_size_8_rank_0.pt`.
pub fn world_size(name: &str) -> Option<u64> {
    let (_, rest) = name.split_once("world_size_")?;
    rest.split('_').next()?.parse().ok()
}
