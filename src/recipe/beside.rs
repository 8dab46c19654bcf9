//! What a view shows beside a file, chosen by the names of files.

use serde::{Deserialize, Serialize};

use super::name_glob::NameGlob;

/// A glob for names of files, which must match one unless it is optional: `"tokenizer*"`, or
/// `{ names = "tokenizer*", optional = true }`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "BesideRuleForm", into = "BesideRuleForm")]
pub struct BesideRule {
    /// The names that it matches.
    pub names: NameGlob,
    /// Whether it may match nothing.
    pub optional: bool,
}

/// The two ways to write a [`BesideRule`].
#[derive(Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a glob such as \"tokenizer*\", or { names = \"tokenizer*\", optional = true }"
)]
enum BesideRuleForm {
    Glob(NameGlob),
    Table(BesideRuleTable),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BesideRuleTable {
    names: NameGlob,
    #[serde(default)]
    optional: bool,
}

impl From<BesideRuleForm> for BesideRule {
    fn from(form: BesideRuleForm) -> BesideRule {
        match form {
            BesideRuleForm::Glob(names) => BesideRule { names, optional: false },
            BesideRuleForm::Table(BesideRuleTable { names, optional }) => {
                BesideRule { names, optional }
            }
        }
    }
}

impl From<BesideRule> for BesideRuleForm {
    fn from(BesideRule { names, optional }: BesideRule) -> BesideRuleForm {
        match optional {
            false => BesideRuleForm::Glob(names),
            true => BesideRuleForm::Table(BesideRuleTable { names, optional }),
        }
    }
}
