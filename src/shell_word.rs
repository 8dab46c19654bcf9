//! Paths and texts as one word of a shell command, for messages that say what to type next.

use std::path::Path;

/// A path as a shell takes it for one word.
pub(crate) fn shell_word(path: &Path) -> String {
    shell_text(&path.display().to_string())
}

/// A text as a shell takes it for one word.
pub(crate) fn shell_text(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,@:=%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_quoted_where_a_shell_would_split_it() {
        assert_eq!(shell_word(Path::new("/m/Llama-3.1_8B.pt")), "/m/Llama-3.1_8B.pt");
        assert_eq!(shell_word(Path::new("/m/it's here")), r"'/m/it'\''s here'");
        assert_eq!(shell_text(""), "''");
    }
}
