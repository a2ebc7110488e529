//! Counts the habits that make code and comments hard to read for a person who did not write them: several values bound in a
//! statement, tuples as parameters, local closures, arms of `true` and `false`, constants without a subject, and pronouns in
//! comments. Reads the product's and the tools' sources, tests left out, and knows no rule.

use crate::names::is_test_only;
use crate::{is_product_source, texts};
use std::collections::BTreeMap;
use syn::visit::{self, Visit};

/// Words that stand for a noun of another sentence.
const PRONOUNS: [&str; 6] = ["it", "its", "they", "them", "their", "those"];
/// Words that stand for a noun of the same sentence.
const ONES: [&str; 2] = ["one", "ones"];
/// What follows `what` in a clause that stands for a noun.
const AFTER_WHAT: [&str; 3] = ["is", "the", "it"];
/// Rates are per this many lines of code or words of comments.
pub const PER: f64 = 10_000.0;

/// The counts.
#[derive(Debug, Default)]
pub struct DialectCensus {
    /// Lines of code, without comments and empty lines.
    pub code_lines: usize,
    /// Words of comments.
    pub comment_words: usize,
    /// Statements `let (a, b) = (x, y)`.
    pub tuple_lets: usize,
    /// Parameters that are tuples.
    pub tuple_parameters: usize,
    /// Closures that are bound to a name.
    pub local_closures: usize,
    /// Arms of `true` and `false`.
    pub bool_arms: usize,
    /// Pronouns in comments.
    pub pronouns: usize,
    /// `one` and `ones` in comments.
    pub ones: usize,
    /// Clauses `what is`, `what the`, `what it` in comments.
    pub what_clauses: usize,
    /// The number of constants by name.
    constants: BTreeMap<String, usize>,
}

impl DialectCensus {
    /// Reads the sources of this tree.
    ///
    /// # Panics
    /// When a source file is not valid Rust.
    pub fn of_this_tree() -> Self {
        let mut census = DialectCensus::default();
        for (path, text) in texts(&[".rs"]) {
            if is_product_source(&path) {
                census.add_source(&text);
            }
        }
        census
    }

    /// Adds a source text.
    ///
    /// # Panics
    /// When the text is not valid Rust.
    pub fn add_source(&mut self, text: &str) {
        let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{error}"));
        self.visit_file(&parsed);
        // Modules of tests stand at the end of files.
        let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        for line in product.lines().map(str::trim).filter(|line| !line.is_empty()) {
            match line.strip_prefix("//") {
                Some(comment) => self.add_comment(comment),
                None => self.code_lines += 1,
            }
        }
    }

    fn add_comment(&mut self, comment: &str) {
        let words: Vec<String> = comment
            .split(|c: char| !c.is_alphanumeric() && c != '\'' && c != '_')
            .filter(|word| !word.is_empty())
            .map(str::to_lowercase)
            .collect();
        let count = |of: &[&str]| words.iter().filter(|word| of.contains(&word.as_str())).count();
        self.comment_words += words.len();
        self.pronouns += count(&PRONOUNS);
        self.ones += count(&ONES);
        self.what_clauses +=
            words.windows(2).filter(|pair| pair[0] == "what" && AFTER_WHAT.contains(&pair[1].as_str())).count();
    }

    /// How many per 10,000 lines of code.
    pub fn per_code(&self, count: usize) -> f64 {
        PER * count as f64 / self.code_lines.max(1) as f64
    }

    /// How many per 10,000 words of comments.
    pub fn per_comment(&self, count: usize) -> f64 {
        PER * count as f64 / self.comment_words.max(1) as f64
    }

    /// The share of constants whose name is a single word, in per cent.
    pub fn one_word_constants(&self) -> f64 {
        self.share_of_constants(|name, _| !name.trim_matches('_').contains('_'))
    }

    /// The share of constants whose name another constant has as well, in per cent.
    pub fn shared_constants(&self) -> f64 {
        self.share_of_constants(|_, count| count > 1)
    }

    fn share_of_constants(&self, is_counted: impl Fn(&str, usize) -> bool) -> f64 {
        let all: usize = self.constants.values().sum();
        let counted = self.constants.iter().filter(|(name, count)| is_counted(name, **count));
        100.0 * counted.map(|(_, count)| count).sum::<usize>() as f64 / all.max(1) as f64
    }
}

impl<'ast> Visit<'ast> for DialectCensus {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        let value = local.init.as_ref().map(|init| &*init.expr);
        match (&local.pat, value) {
            (syn::Pat::Tuple(_), Some(syn::Expr::Tuple(_))) => self.tuple_lets += 1,
            (_, Some(syn::Expr::Closure(_))) => self.local_closures += 1,
            _ => {}
        }
        visit::visit_local(self, local);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.tuple_parameters += signature
            .inputs
            .iter()
            .filter(|argument| match argument {
                syn::FnArg::Typed(typed) => matches!(&*typed.ty, syn::Type::Tuple(tuple) if !tuple.elems.is_empty()),
                syn::FnArg::Receiver(_) => false,
            })
            .count();
        visit::visit_signature(self, signature);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if let syn::Pat::Lit(literal) = &arm.pat
            && matches!(literal.lit, syn::Lit::Bool(_))
        {
            self.bool_arms += 1;
        }
        visit::visit_arm(self, arm);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        if item.ident != "_" {
            *self.constants.entry(item.ident.to_string()).or_default() += 1;
        }
        visit::visit_item_const(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn habits_are_counted_and_tests_are_not() {
        let source = "/// It is one of them: what is read.
const PATIENCE: u32 = 1;
const WAIT_MS: u32 = 2;
fn read_pair((a, b): (u32, u32), n: u32) {
    let (c, d) = (a, b);
    let (e, f) = pair();
    let add = |x| x + n;
    match a > b { true => {} false => {} }
}
#[cfg(test)]
mod tests {
    // It does not count.
    fn test() { let (a, b) = (1, 2); }
}";
        let mut census = DialectCensus::default();
        census.add_source(source);
        assert_eq!((census.tuple_lets, census.tuple_parameters, census.local_closures, census.bool_arms), (1, 1, 1, 2));
        assert_eq!((census.pronouns, census.ones, census.what_clauses, census.comment_words), (2, 1, 1, 8));
        assert_eq!(census.code_lines, 8);
        assert!((census.one_word_constants() - 50.0).abs() < 0.1 && census.shared_constants() < 0.1);
    }
}
