//! Globs and regular expressions for names.

use std::fmt;

use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};

/// Maximum bytes of a compiled pattern. One `\w`, which stands for the letters of all languages, takes some 45 KB. A recipe
/// has up to 1,024 patterns.
const MAX_PATTERN_BYTES: usize = 256 << 10;

/// Maximum bytes of a pattern's lazy DFA cache in each thread. A smaller cache makes matching slower.
const MAX_MATCHER_BYTES: usize = 256 << 10;

/// A glob for names of tensors or files. `*` stands for any text, dots included, `?` for one character, `[ab]` for a
/// or b, and `[!ab]` for any other character.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NameGlob {
    text: String,
    regex: Regex,
}

/// A regular expression for names. Matching takes time in proportion to a name's length.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NameRegex {
    text: String,
    pub regex: Regex,
}

impl NameGlob {
    /// Whether the glob matches a whole name.
    pub fn matches(&self, name: &str) -> bool {
        self.regex.is_match(name)
    }

    /// The regular expression of the glob, without groups.
    pub fn to_regex(&self) -> NameRegex {
        NameRegex { text: self.text.clone(), regex: self.regex.clone() }
    }
}

impl fmt::Display for NameGlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Display for NameRegex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for NameGlob {
    type Error = String;

    fn try_from(text: String) -> Result<NameGlob, String> {
        let regex = glob_regex(&text).ok_or_else(|| format!("`{text}`: a `[` has no `]`"))?;
        let regex = compile(&regex).map_err(|reason| format!("`{text}` is no glob: {reason}"))?;
        Ok(NameGlob { text, regex })
    }
}

impl From<NameGlob> for String {
    fn from(glob: NameGlob) -> String {
        glob.text
    }
}

impl NameRegex {
    /// The same pattern, which must match a whole name.
    pub fn whole(&self) -> Result<NameRegex, String> {
        let text = format!("^(?:{})$", self.text);
        Ok(NameRegex { regex: compile(&text)?, text: self.text.clone() })
    }
}

impl TryFrom<String> for NameRegex {
    type Error = String;

    fn try_from(text: String) -> Result<NameRegex, String> {
        let regex = compile(&text)
            .map_err(|reason| format!("`{text}` is no regular expression: {reason}"))?;
        Ok(NameRegex { text, regex })
    }
}

impl From<NameRegex> for String {
    fn from(pattern: NameRegex) -> String {
        pattern.text
    }
}

fn compile(text: &str) -> Result<Regex, String> {
    let mut builder = RegexBuilder::new(text);
    builder.size_limit(MAX_PATTERN_BYTES).dfa_size_limit(MAX_MATCHER_BYTES);
    builder.build().map_err(|error| match error {
        regex::Error::CompiledTooBig(limit) => format!("it takes more than {limit} bytes"),
        // Several lines that draw the place of the fault; the last says what it is.
        error => error.to_string().lines().last().unwrap_or_default().replace("error: ", ""),
    })
}

/// The regular expression of a glob; `None` if a bracket is not closed.
fn glob_regex(glob: &str) -> Option<String> {
    let mut regex = String::from("(?s)^");
    let mut rest = glob.chars();
    while let Some(c) = rest.next() {
        match c {
            '*' => regex.push_str(".*"),
            '?' => regex.push('.'),
            '[' => {
                let (inside, after) = rest.as_str().split_once(']')?;
                let (negation, inside) = match inside.strip_prefix('!') {
                    Some(inside) => ("^", inside),
                    None => ("", inside),
                };
                if inside.is_empty() {
                    return None;
                }
                // A hyphen stays, for ranges; the rest has no other meaning in a glob.
                let escaped = regex::escape(inside).replace("\\-", "-");
                regex.push_str(&format!("[{negation}{escaped}]"));
                rest = after.chars();
            }
            c => regex.push_str(&regex::escape(c.encode_utf8(&mut [0; 4]))),
        }
    }
    regex.push('$');
    Some(regex)
}

/// A glob that must match something, unless it is optional: `"a.*"`, or `{ tensors = "a.*", optional = true }`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "GlobRuleForm", into = "GlobRuleForm")]
pub struct GlobRule {
    /// The names that it matches.
    pub tensors: NameGlob,
    /// Whether it may match nothing.
    pub optional: bool,
}

/// The two ways to write a [`GlobRule`].
#[derive(Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a glob such as \"layers.*\", or { tensors = \"layers.*\", optional = true }"
)]
enum GlobRuleForm {
    Glob(NameGlob),
    Table(GlobRuleTable),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GlobRuleTable {
    tensors: NameGlob,
    #[serde(default)]
    optional: bool,
}

impl From<GlobRuleForm> for GlobRule {
    fn from(form: GlobRuleForm) -> GlobRule {
        match form {
            GlobRuleForm::Glob(tensors) => GlobRule { tensors, optional: false },
            GlobRuleForm::Table(GlobRuleTable { tensors, optional }) => {
                GlobRule { tensors, optional }
            }
        }
    }
}

impl From<GlobRule> for GlobRuleForm {
    fn from(GlobRule { tensors, optional }: GlobRule) -> GlobRuleForm {
        match optional {
            false => GlobRuleForm::Glob(tensors),
            true => GlobRuleForm::Table(GlobRuleTable { tensors, optional }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_names_across_dots() {
        let matches =
            |glob: &str, name: &str| NameGlob::try_from(glob.to_owned()).unwrap().matches(name);
        assert!(matches("layers.*", "layers.0.mlp.weight"));
        assert!(matches("*.weight", "layers.0.mlp.weight"));
        assert!(!matches("layers.*", "model.layers.0"));
        assert!(matches("layers.?.w", "layers.1.w") && !matches("layers.?.w", "layers.10.w"));
        assert!(matches("a[0-2]b", "a1b") && !matches("a[!0-2]b", "a1b"));
        assert!(matches("a+(b)|c", "a+(b)|c") && !matches("a.c", "abc"));
        assert!(matches("*", "a\nb") && matches("", ""));
        assert!(NameGlob::try_from("a[b".to_owned()).is_err());
        assert!(NameGlob::try_from("a[]b".to_owned()).is_err());
    }

    #[test]
    fn patterns_with_some_classes_of_all_languages_are_compiled() {
        let pattern = NameRegex::try_from(r"^(\w+)\.(\w+)\.\d+$".to_owned()).unwrap();
        assert!(pattern.regex.is_match("model.layers.7"));
    }

    #[test]
    fn patterns_that_explode_are_refused() {
        for pattern in ["(", "(a{1000}){1000}", "((a{100}){100}){100}"] {
            let refused = NameRegex::try_from(pattern.to_owned()).unwrap_err();
            assert!(
                !refused.contains('\n') && refused.contains("no regular expression"),
                "{refused}"
            );
        }
    }
}
