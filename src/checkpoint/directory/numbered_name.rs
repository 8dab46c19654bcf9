//! Numbers in names: of ranks and of steps.

/// Splits a name before the digits at its end.
pub fn split_digits(name: &str) -> (&str, &str) {
    let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
    name.split_at(name.len() - digits)
}

/// Splits `X_rank_3.pt` or `X_rank3.bin` into `X_rank_` and 3.
pub fn split_rank(name: &str) -> Option<(&str, u32)> {
    let (stem, _) = name.rsplit_once('.')?;
    let (stem, number) = split_digits(stem);
    stem.trim_end_matches(['_', '-']).strip_suffix("rank")?;
    Some((stem, number.parse().ok()?))
}

/// The number of ranks in `model_world_size_8_rank_0.pt`.
pub fn world_size(name: &str) -> Option<u64> {
    let (_, rest) = name.split_once("world_size_")?;
    rest.split('_').next()?.parse().ok()
}
