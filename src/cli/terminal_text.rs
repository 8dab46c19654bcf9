//! Formats text for a terminal: without control characters, in lines that fit, with sizes and counts in words.

use std::borrow::Cow;
use std::io;

/// The size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    pub columns: usize,
    pub rows: usize,
}

/// The size of text where the terminal does not tell its own: that of the first terminals.
const DEFAULT_SIZE: TerminalSize = TerminalSize { columns: 80, rows: 24 };

/// In longer lines the eye loses its place.
const MAX_LINE_CHARACTERS: usize = 120;

/// The same of help, whose paragraphs are long.
const MAX_HELP_LINE_CHARACTERS: usize = 100;

/// The width of help on standard output.
pub fn help_width() -> usize {
    terminal_size().columns.min(MAX_HELP_LINE_CHARACTERS)
}

/// The size that text on standard output may have.
pub fn terminal_size() -> TerminalSize {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            let columns = usize::from(size.ws_col).min(MAX_LINE_CHARACTERS);
            TerminalSize { columns, rows: size.ws_row.into() }
        }
        _ => DEFAULT_SIZE,
    }
}

/// Breaks a text at spaces into lines of at most `width` characters. A longer word is broken too.
#[cfg(feature = "mount")]
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let (mut lines, mut line, mut length) = (Vec::new(), String::new(), 0);
    for (n, word) in text.split(' ').enumerate() {
        let mut rest: Vec<char> = word.chars().collect();
        if n > 0 && length + 1 + rest.len() <= width {
            line.push(' ');
            length += 1;
        } else if length > 0 {
            lines.push(std::mem::take(&mut line));
            length = 0;
        }
        while rest.len() > width - length {
            let room = width - length;
            // A path breaks behind a slash, if there is one.
            let slash = rest[..room].iter().rposition(|&c| c == '/').filter(|&at| at > 0);
            let tail = rest.split_off(slash.map_or(room, |at| at + 1));
            line.extend(rest);
            lines.push(std::mem::take(&mut line));
            (rest, length) = (tail, 0);
        }
        length += rest.len();
        line.extend(rest);
    }
    lines.push(line);
    lines
}

/// Escapes text that must stay on one line and must not drive the terminal: messages, names, keys, values.
pub fn one_line(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c);
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => escaped.push_str("\\n"),
            c if is_harmful(c) => escaped.extend(c.escape_unicode()),
            c => escaped.push(c),
        }
    }
    Cow::Owned(escaped)
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
        assert_eq!(one_line("\x1b[2Jgone\r\u{202e}"), "\\u{1b}[2Jgone\\u{d}\\u{202e}");
        assert_eq!(one_line("a\nb"), "a\\nb");
    }

    #[cfg(feature = "mount")]
    #[test]
    fn lines_break_at_spaces_and_long_words_anywhere() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("a 0123456789 b", 4), ["a", "0123", "4567", "89 b"]);
        assert_eq!(wrap("01234567 89", 4), ["0123", "4567", "89"]);
        assert_eq!(wrap("/mnt/models/a", 9), ["/mnt/", "models/a"]);
        assert_eq!(wrap("", 4), [""]);
        assert_eq!(wrap("a  b", 9), ["a  b"]);
    }

    #[test]
    fn sizes_in_words() {
        assert_eq!(format_bytes(999), "999 bytes");
        assert_eq!(format_bytes(1000), "1.0 kB");
        assert_eq!(format_bytes(999_960), "1.0 MB");
        assert_eq!(format_bytes(2_200_000_000), "2.2 GB");
    }
}
