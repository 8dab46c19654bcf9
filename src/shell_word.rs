//! Paths and texts as one word of a shell command, for messages that say what to type next.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A path as a shell takes it for one word, which no program takes for an option or for standard input.
pub(crate) fn shell_word(path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes();
    match bytes.first() {
        Some(b'-') => quote(&[b"./", bytes].concat()),
        _ => quote(bytes),
    }
}

/// A text as a shell takes it for one word.
pub(crate) fn shell_text(text: &str) -> String {
    quote(text.as_bytes())
}

fn quote(bytes: &[u8]) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,@:=%".contains(c);
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.is_empty() && text.chars().all(is_plain) => text.to_owned(),
        Ok(text) if !text.contains(char::is_control) => {
            format!("'{}'", text.replace('\'', r"'\''"))
        }
        _ => quote_escaped(bytes),
    }
}

/// Quotes what cannot be typed or printed: control characters, and bytes that are no text. bash, zsh and ksh read it.
fn quote_escaped(bytes: &[u8]) -> String {
    let mut word = String::from("$'");
    let escape = |word: &mut String, bytes: &[u8]| {
        bytes.iter().for_each(|byte| word.push_str(&format!("\\{byte:03o}")));
    };
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\n' => word.push_str("\\n"),
                '\'' | '\\' => word.extend(['\\', c]),
                c if c.is_control() => escape(&mut word, c.encode_utf8(&mut [0; 4]).as_bytes()),
                c => word.push(c),
            }
        }
        escape(&mut word, chunk.invalid());
    }
    word.push('\'');
    word
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn a_word_is_quoted_where_a_shell_would_split_it() {
        assert_eq!(shell_word(Path::new("/m/Llama-3.1_8B.pt")), "/m/Llama-3.1_8B.pt");
        assert_eq!(shell_word(Path::new("/m/it's here")), r"'/m/it'\''s here'");
        assert_eq!(shell_text(""), "''");
    }

    #[test]
    fn a_path_is_no_option() {
        assert_eq!(shell_word(Path::new("-d.bin")), "./-d.bin");
        assert_eq!(shell_word(Path::new("-a b")), "'./-a b'");
        assert_eq!(shell_word(Path::new("-")), "./-");
    }

    #[test]
    fn bash_reads_every_name_as_it_is() {
        let names: [&[u8]; 4] = [b"a\nb'c", b"\x1b[31mX\x07", b"caf\xe9\\1", "\u{85}é".as_bytes()];
        for name in names {
            let word = shell_word(Path::new(OsStr::from_bytes(name)));
            assert!(!word.contains(char::is_control), "{word:?}");
            let command = format!("printf %s {word}");
            let mut bash = std::process::Command::new("bash");
            assert_eq!(bash.args(["-c", &command]).output().unwrap().stdout, name, "{word}");
        }
    }
}
