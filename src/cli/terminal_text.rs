//! Formats text for a terminal: without control characters, with sizes and counts in words.

use std::borrow::Cow;

/// Escapes control characters, which could drive the terminal. Line breaks of our own messages stay.
pub fn escape_controls(text: &str) -> Cow<'_, str> {
    let is_harmful =
        |c: char| (c.is_control() && c != '\n') || ('\u{202a}'..='\u{202e}').contains(&c);
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let escaped = text
        .chars()
        .map(|c| if is_harmful(c) { c.escape_unicode().to_string() } else { c.to_string() });
    Cow::Owned(escaped.collect())
}

/// Escapes text that must stay on one line: names, keys, values.
pub fn one_line(text: &str) -> String {
    escape_controls(text).replace('\n', "\\n")
}

/// Formats a size in decimal units: `1.5 GB`.
pub fn format_bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if count < 1000 {
        return format!("{count} bytes");
    }
    let mut value = count as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Formats a count: `1 tensor`, `2 tensors`.
pub fn format_count(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_drive_the_terminal() {
        assert_eq!(escape_controls("layer.0\nlayer.1"), "layer.0\nlayer.1");
        assert_eq!(escape_controls("\x1b[2Jgone\r\u{202e}"), "\\u{1b}[2Jgone\\u{d}\\u{202e}");
        assert_eq!(one_line("a\nb"), "a\\nb");
    }

    #[test]
    fn sizes_in_words() {
        assert_eq!(format_bytes(999), "999 bytes");
        assert_eq!(format_bytes(1000), "1.0 kB");
        assert_eq!(format_bytes(999_960), "1.0 MB");
        assert_eq!(format_bytes(2_200_000_000), "2.2 GB");
    }
}
