//! Counts how much a name says: one-word names of types and functions, and type names that several types share. Reads the
//! product's and the tools' sources and knows no rule; the ceilings are a test of this crate.

use crate::{is_product_source, root, texts};
use std::collections::BTreeMap;
use std::path::PathBuf;
use syn::visit::{self, Visit};

/// A definition and the file that holds it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedItem {
    /// The name.
    pub name: String,
    /// The file, from the root of the tree.
    pub file: PathBuf,
}

/// Every type and function that the sources define, tests left out. Functions whose names a trait fixes are left out, too.
#[derive(Debug, Default)]
pub struct NameCensus {
    /// Structs, enums, traits, unions and type aliases.
    pub types: Vec<NamedItem>,
    /// Functions, inherent methods and the methods that a trait declares.
    pub functions: Vec<NamedItem>,
}

impl NameCensus {
    /// Reads the sources of this tree.
    ///
    /// # Panics
    /// When a source file is not valid Rust.
    pub fn of_this_tree() -> Self {
        let mut census = NameCensus::default();
        for (path, text) in texts(&[".rs"]) {
            if is_product_source(&path) {
                let file = path.strip_prefix(root()).unwrap_or(&path).to_owned();
                let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
                Collector { census: &mut census, file }.visit_file(&parsed);
            }
        }
        census
    }

    /// Types whose name is a single word.
    pub fn one_word_types(&self) -> Vec<&NamedItem> {
        self.types.iter().filter(|item| words_of_type(&item.name) <= 1).collect()
    }

    /// Types whose name another type has as well.
    pub fn shared_types(&self) -> Vec<&NamedItem> {
        let mut count: BTreeMap<&str, usize> = BTreeMap::new();
        for item in &self.types {
            *count.entry(&item.name).or_default() += 1;
        }
        self.types.iter().filter(|item| count[item.name.as_str()] > 1).collect()
    }

    /// Functions whose name is a single word.
    pub fn one_word_functions(&self) -> Vec<&NamedItem> {
        self.functions.iter().filter(|item| !item.name.trim_matches('_').contains('_')).collect()
    }
}

/// The number of words in a type's name: `PathState` has two, `IOError` two, `Tcp` one.
fn words_of_type(name: &str) -> usize {
    let chars: Vec<char> = name.chars().collect();
    let starts = |i: usize| {
        let upper = chars[i].is_uppercase();
        let after_lower = i > 0 && !chars[i - 1].is_uppercase();
        let before_lower = chars.get(i + 1).is_some_and(|next| next.is_lowercase());
        upper && (i == 0 || after_lower || before_lower)
    };
    (0..chars.len()).filter(|i| starts(*i)).count()
}

struct Collector<'a> {
    census: &'a mut NameCensus,
    file: PathBuf,
}

impl Collector<'_> {
    fn add_type(&mut self, name: &syn::Ident) {
        self.census.types.push(NamedItem { name: name.to_string(), file: self.file.clone() });
    }

    fn add_function(&mut self, name: &syn::Ident) {
        self.census.functions.push(NamedItem { name: name.to_string(), file: self.file.clone() });
    }
}

pub(crate) fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg")
                && attribute.parse_args::<syn::Ident>().is_ok_and(|condition| condition == "test"))
    })
}

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add_type(&item.ident);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add_type(&item.ident);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.add_type(&item.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add_type(&item.ident);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add_type(&item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.add_function(&item.sig.ident);
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test_only(&item.attrs) {
            self.add_function(&item.sig.ident);
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        for part in &item.items {
            if let syn::ImplItem::Fn(function) = part {
                if item.trait_.is_none() && !is_test_only(&function.attrs) {
                    self.add_function(&function.sig.ident);
                }
                visit::visit_impl_item_fn(self, function);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_counted_as_a_reader_sees_them() {
        let words: Vec<usize> = ["Tcp", "PathState", "IOError", "S3", "EtcdUrl", "A"].map(words_of_type).to_vec();
        assert_eq!(words, [1, 2, 2, 1, 2, 1]);
    }

    #[test]
    fn tests_and_methods_of_foreign_traits_do_not_count() {
        let source =
            "struct BlockSlot; impl BlockSlot { fn open(&self) {} } impl Drop for BlockSlot { fn drop(&mut self) {} }
            #[cfg(test)] mod tests { struct Helper; fn helper() {} } trait Reader { fn read_all(&self); }";
        let mut census = NameCensus::default();
        Collector { census: &mut census, file: "src/lib.rs".into() }.visit_file(&syn::parse_file(source).unwrap());
        let names = |items: &[NamedItem]| items.iter().map(|i| i.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&census.types), ["BlockSlot", "Reader"]);
        assert_eq!(names(&census.functions), ["open", "read_all"]);
        assert_eq!((census.one_word_types().len(), census.one_word_functions().len()), (1, 1));
    }
}
