//! Texts of a bounded length, for messages about names that a hostile file may choose.

/// Characters that are kept of a text. A longer one is cut in the middle.
const MAX_TEXT_CHARACTERS: usize = 1_024;

/// Cuts the middle out of a text that is too long.
pub(crate) fn clip(text: &str) -> String {
    let length = text.chars().count();
    if length <= MAX_TEXT_CHARACTERS {
        return text.to_owned();
    }
    let half = MAX_TEXT_CHARACTERS / 2;
    let (start, end) = (text.chars().take(half), text.chars().skip(length - half));
    start.chain(['…']).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_keep_both_ends() {
        let text = format!("start{}end", "é".repeat(5_000));
        let clipped = clip(&text);
        assert!(clipped.starts_with("start") && clipped.ends_with("end"));
        assert_eq!(clipped.chars().count(), MAX_TEXT_CHARACTERS + 1);
        assert_eq!(clip("short"), "short");
    }
}
