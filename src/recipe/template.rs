//! Templates of names: text with groups of a match in it.

use regex::{Captures, Regex};

/// Maximum bytes of a name that a template makes: more than any module path, and little beside a header.
const MAX_NAME_BYTES: usize = 64 << 10;

/// A template: `$1` and `${name}` stand for groups, `$$` for a dollar sign, `{}` for a number where there is one.
#[derive(Clone, Debug)]
pub struct Template {
    pieces: Vec<TemplatePiece>,
}

#[derive(Clone, Debug)]
enum TemplatePiece {
    Text(String),
    Group(usize),
    Number,
}

impl Template {
    /// Parses a template for the groups of a pattern. A group that the pattern lacks is an error: it would be empty.
    pub fn parse(text: &str, pattern: &Regex, has_number: bool) -> Result<Template, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(at) = rest.find(|c| c == '$' || (c == '{' && has_number)) {
            push_text(&mut pieces, &rest[..at]);
            rest = &rest[at..];
            if let Some(after) = rest.strip_prefix("$$") {
                push_text(&mut pieces, "$");
                rest = after;
            } else if let Some(after) = rest.strip_prefix("{}") {
                pieces.push(TemplatePiece::Number);
                rest = after;
            } else if let Some(after) = rest.strip_prefix('$') {
                let (name, after) = group_name(after)
                    .ok_or_else(|| format!("`{text}`: write $$ for a dollar sign"))?;
                pieces.push(TemplatePiece::Group(find_group(pattern, name).ok_or_else(|| {
                    format!("`{text}`: `{pattern}` has no group `{name}`; write ${{1}} if text follows the group")
                })?));
                rest = after;
            } else {
                push_text(&mut pieces, "{");
                rest = &rest[1..];
            }
        }
        push_text(&mut pieces, rest);
        Ok(Template { pieces })
    }

    /// Whether the template has a place for a number.
    pub fn has_number(&self) -> bool {
        self.pieces.iter().any(|piece| matches!(piece, TemplatePiece::Number))
    }

    /// The name for a match; `None` if it would be too long.
    pub fn expand(&self, captures: &Captures<'_>, number: u64) -> Option<String> {
        let number = number.to_string();
        let text = |piece: &'_ TemplatePiece| match piece {
            TemplatePiece::Text(text) => text.len(),
            TemplatePiece::Group(group) => captures.get(*group).map_or(0, |found| found.len()),
            TemplatePiece::Number => number.len(),
        };
        if self.pieces.iter().map(text).sum::<usize>() > MAX_NAME_BYTES {
            return None;
        }
        let mut name = String::new();
        for piece in &self.pieces {
            name.push_str(match piece {
                TemplatePiece::Text(text) => text,
                TemplatePiece::Group(group) => {
                    captures.get(*group).map_or("", |found| found.as_str())
                }
                TemplatePiece::Number => &number,
            });
        }
        Some(name)
    }
}

fn push_text(pieces: &mut Vec<TemplatePiece>, text: &str) {
    match pieces.last_mut() {
        _ if text.is_empty() => {}
        Some(TemplatePiece::Text(last)) => last.push_str(text),
        _ => pieces.push(TemplatePiece::Text(text.to_owned())),
    }
}

/// The name of the group after a dollar sign, and the text that follows.
fn group_name(text: &str) -> Option<(&str, &str)> {
    if let Some(inside) = text.strip_prefix('{') {
        return inside.split_once('}');
    }
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

fn find_group(pattern: &Regex, name: &str) -> Option<usize> {
    if let Ok(number) = name.parse::<usize>() {
        return (number < pattern.captures_len()).then_some(number);
    }
    pattern.capture_names().position(|group| group == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_put_in_and_unknown_ones_are_refused() {
        let pattern = Regex::new(r"^(a+)\.(?<rest>.*)$").unwrap();
        let captures = pattern.captures("aa.b.c").unwrap();
        let expand = |text: &str| {
            Template::parse(text, &pattern, true)
                .map(|template| template.expand(&captures, 7).unwrap())
        };
        assert_eq!(expand("x.$2.$1").unwrap(), "x.b.c.aa");
        assert_eq!(expand("${1}_$rest{}$$").unwrap(), "aa_b.c7$");
        assert_eq!(expand("{x}").unwrap(), "{x}");
        for wrong in ["$3", "$1_x", "$nothing", "a$", "${1"] {
            assert!(expand(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_that_grow_without_end_are_refused_before_they_are_made() {
        let pattern = Regex::new("^.*$").unwrap();
        let template = Template::parse(&"$0".repeat(1000), &pattern, false).unwrap();
        let long = "a".repeat(1000);
        assert!(template.expand(&pattern.captures(&long).unwrap(), 0).is_none());
    }
}
