//! Weighs the tree: lines, long functions, tuple assignments, owners of many methods, optional methods of a trait, and modules that
//! import each other in a circle. Reads the product's and the tools' sources, tests left out, and knows no rule.

use crate::names::is_test_only;
use crate::{is_product_source, root, texts};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use syn::visit::{self, Visit};

const LONG_FUNCTION_LINES: usize = 100;

/// A module of a crate: the names of the modules that lead to it.
type ModulePath = Vec<String>;

/// The weights of the sources.
#[derive(Debug, Default)]
pub struct TreeWeights {
    /// Lines of the sources, comments and empty lines included.
    pub lines: usize,
    /// Lines of `tools/bench`.
    pub bench_lines: usize,
    /// Functions of more than a hundred lines, each with the file.
    pub long_functions: Vec<String>,
    /// Assignments `(a, b) = (x, y)`.
    pub tuple_assignments: usize,
    /// Inherent methods, by crate and type.
    methods: BTreeMap<(String, String), usize>,
    /// Methods with a body in a trait, by trait.
    optional: BTreeMap<String, BTreeSet<String>>,
    /// How many types implement a method of a trait, by trait and method.
    implemented: BTreeMap<(String, String), usize>,
    /// By crate.
    modules: BTreeMap<String, BTreeMap<ModulePath, ModulePaths>>,
}

/// The paths that a module names.
#[derive(Debug, Default)]
struct ModulePaths {
    named: Vec<ModulePath>,
    /// By the exported name.
    exported: BTreeMap<String, ModulePath>,
}

impl TreeWeights {
    /// Reads the sources of this tree.
    ///
    /// # Panics
    /// When a source file is not valid Rust.
    pub fn of_this_tree() -> Self {
        let mut weights = TreeWeights::default();
        for (path, text) in texts(&[".rs"]) {
            if is_product_source(&path) {
                weights.add_source(path.strip_prefix(root()).unwrap_or(&path), &text);
            }
        }
        weights
    }

    /// Adds the text of a file, unless the file has tests only.
    ///
    /// # Panics
    /// When the text is not valid Rust.
    pub fn add_source(&mut self, file: &Path, text: &str) {
        let shown = file.display().to_string();
        let Some((package, inside)) = shown.split_once("/src/") else { return };
        let mut module: ModulePath = inside.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        if module.iter().any(|name| name == "tests") {
            return;
        }
        if module.last().is_some_and(|name| name == "mod") || matches!(inside, "lib.rs" | "main.rs") {
            module.pop();
        }
        // Modules of tests stand at the end of files.
        let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        self.lines += product.lines().count();
        if package == "tools/bench" {
            self.bench_lines += product.lines().count();
        }
        self.long_functions.extend(long_functions(product).into_iter().map(|name| format!("{name} of {shown}")));
        let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{shown}: {error}"));
        let mut reader = SourceReader { weights: self, package, paths: ModulePaths::default() };
        reader.visit_file(&parsed);
        let paths = reader.paths;
        self.modules.entry(package.to_owned()).or_default().insert(module, paths);
    }

    /// The types with the most inherent methods, the heaviest first.
    pub fn owners(&self) -> Vec<(&str, usize)> {
        let mut owners: Vec<(&str, usize)> =
            self.methods.iter().map(|((_, owner), count)| (&**owner, *count)).collect();
        owners.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        owners
    }

    /// The optional methods of these traits that one type implements.
    pub fn single_methods(&self, traits: &[&str]) -> Vec<String> {
        let optional = self.optional.iter().filter(|(of, _)| traits.contains(&of.as_str()));
        let pairs = optional.flat_map(|(of, methods)| methods.iter().map(|method| (of.clone(), method.clone())));
        let single = pairs.filter(|pair| self.implemented.get(pair) == Some(&1));
        single.map(|(of, method)| format!("{of}::{method}")).collect()
    }

    /// The modules that import themselves by way of others, a text for each crate, and their share of all modules in per cent.
    pub fn circles(&self) -> (Vec<String>, f64) {
        let mut circles = Vec::new();
        let mut circular = 0;
        for (package, modules) in &self.modules {
            let imports: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> =
                modules.keys().map(|module| (module, imports_of(modules, module))).collect();
            let circle: Vec<String> = modules
                .keys()
                .filter(|module| reaches_itself(&imports, module))
                .map(|module| if module.is_empty() { "the root".to_owned() } else { module.join("::") })
                .collect();
            circular += circle.len();
            if !circle.is_empty() {
                circles.push(format!("{package} ({}): {}", circle.len(), circle.join(", ")));
            }
        }
        let all: usize = self.modules.values().map(BTreeMap::len).sum();
        (circles, 100.0 * circular as f64 / all.max(1) as f64)
    }
}

/// The names of the long functions of a text in the form of rustfmt: the last line of a function has the indentation of the first.
fn long_functions(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let mut long = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let Some((before, name)) = line.split_once("fn ") else { continue };
        if before
            .split_whitespace()
            .any(|word| !word.starts_with("pub") && !matches!(word, "async" | "const" | "unsafe"))
        {
            continue;
        }
        let is_last = |last: &&str| indentation(last) == indentation(line) && last.ends_with(['}', ';']);
        let length = lines[start..].iter().position(is_last).map_or(0, |last| last + 1);
        if length > LONG_FUNCTION_LINES {
            long.push(name.split(['(', '<']).next().unwrap_or_default());
        }
    }
    long
}

/// The other modules that a module names.
fn imports_of<'a>(modules: &'a BTreeMap<ModulePath, ModulePaths>, module: &ModulePath) -> BTreeSet<&'a ModulePath> {
    let named = modules[module].named.iter().filter_map(|path| absolute_path(modules, module, path));
    named.filter_map(|path| resolve_path(modules, path)).filter(|named| *named != module).collect()
}

/// A path from the root of the crate; `None` for a path into another crate.
fn absolute_path(
    modules: &BTreeMap<ModulePath, ModulePaths>,
    module: &ModulePath,
    path: &[String],
) -> Option<ModulePath> {
    let ups = path.iter().take_while(|name| *name == "super").count();
    let start = match path.first()?.as_str() {
        "crate" => &[],
        "super" => module.get(..module.len().checked_sub(ups)?)?,
        "self" => module,
        child => {
            let is_child = modules.contains_key(&[module.as_slice(), &[child.to_owned()]].concat());
            return is_child.then(|| [module.as_slice(), path].concat());
        }
    };
    Some([start, &path[ups.max(1)..]].concat())
}

/// The module that has the last name of a path, or the module that the name is exported from.
fn resolve_path(modules: &BTreeMap<ModulePath, ModulePaths>, mut path: ModulePath) -> Option<&ModulePath> {
    // Exports of exports, and no circle of them.
    for _ in 0..8 {
        let depth = (0..=path.len()).rev().find(|depth| modules.contains_key(&path[..*depth]))?;
        let (module, paths) = modules.get_key_value(&path[..depth])?;
        let exported = path.get(depth).and_then(|name| paths.exported.get(name));
        let Some(target) = exported.and_then(|target| absolute_path(modules, module, target)) else {
            return Some(module);
        };
        path = [target.as_slice(), &path[depth + 1..]].concat();
    }
    None
}

fn reaches_itself(imports: &BTreeMap<&ModulePath, BTreeSet<&ModulePath>>, module: &ModulePath) -> bool {
    let mut reached: BTreeSet<&ModulePath> = BTreeSet::new();
    let mut next: Vec<&ModulePath> = imports[module].iter().copied().collect();
    while let Some(one) = next.pop() {
        if reached.insert(one) {
            next.extend(&imports[one]);
        }
    }
    reached.contains(module)
}

struct SourceReader<'a> {
    weights: &'a mut TreeWeights,
    package: &'a str,
    paths: ModulePaths,
}

impl SourceReader<'_> {
    fn add_use(&mut self, before: &[String], tree: &syn::UseTree, is_export: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (path, name) = match tree {
            syn::UseTree::Path(path) => return self.add_use(&with(&path.ident), &path.tree, is_export),
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.add_use(before, tree, is_export));
            }
            syn::UseTree::Name(name) => (with(&name.ident), name.ident.to_string()),
            syn::UseTree::Rename(renamed) => (with(&renamed.ident), renamed.rename.to_string()),
            syn::UseTree::Glob(_) => (before.to_vec(), "*".to_owned()),
        };
        if is_export {
            self.paths.exported.insert(name, path);
        } else {
            self.paths.named.push(path);
        }
    }
}

impl<'ast> Visit<'ast> for SourceReader<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_use(&[], &item.tree, !matches!(item.vis, syn::Visibility::Inherited));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            self.paths.named.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_expr_assign(&mut self, assign: &'ast syn::ExprAssign) {
        if matches!((&*assign.left, &*assign.right), (syn::Expr::Tuple(_), syn::Expr::Tuple(_))) {
            self.weights.tuple_assignments += 1;
        }
        visit::visit_expr_assign(self, assign);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        let methods = item.items.iter().filter_map(|part| match part {
            syn::TraitItem::Fn(method) if method.default.is_some() => Some(method.sig.ident.to_string()),
            _ => None,
        });
        self.weights.optional.entry(item.ident.to_string()).or_default().extend(methods);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if is_test_only(&item.attrs) {
            return;
        }
        let methods = item.items.iter().filter_map(|part| match part {
            syn::ImplItem::Fn(method) if !is_test_only(&method.attrs) => Some(method.sig.ident.to_string()),
            _ => None,
        });
        let last_name = |path: &syn::Path| path.segments.last().map(|segment| segment.ident.to_string());
        if let Some(of) = item.trait_.as_ref().and_then(|(path, _)| last_name(path)) {
            for method in methods {
                *self.weights.implemented.entry((of.clone(), method)).or_default() += 1;
            }
        } else if let syn::Type::Path(owner) = &*item.self_ty
            && let Some(owner) = last_name(&owner.path)
        {
            *self.weights.methods.entry((self.package.to_owned(), owner)).or_default() += methods.count();
        }
        visit::visit_item_impl(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_and_assignments_count_and_tests_do_not() {
        let source = "trait Volume { fn read(&self); fn sync(&self) {} fn lock(&self) {} }
struct Slot;
impl Slot { fn open(&mut self) { (self.a, self.b) = (1, 2); (self.a, self.b) = pair(); } fn close(&self) {} }
impl Volume for Slot { fn read(&self) {} fn sync(&self) {} }
impl Volume for Other { fn read(&self) {} fn sync(&self) {} fn lock(&self) {} }
#[cfg(test)]
mod tests {
    impl Slot { fn hold(&self) {} }
}";
        let mut weights = TreeWeights::default();
        weights.add_source(Path::new("tools/bench/src/slot.rs"), source);
        assert_eq!((weights.lines, weights.bench_lines, weights.tuple_assignments), (5, 5, 1));
        assert_eq!(weights.owners(), [("Slot", 2)]);
        assert_eq!(weights.single_methods(&["Volume"]), ["Volume::lock"]);
    }

    #[test]
    fn modules_in_a_circle_are_found_through_exports() {
        let mut weights = TreeWeights::default();
        for (file, source) in [
            ("lib.rs", "mod disk; mod index; mod slot; pub use slot::Slot;"),
            ("disk.rs", "use crate::index::Index;"),
            ("index/mod.rs", "mod page; fn read() { page::read(); }"),
            ("index/page.rs", "use super::Index; use crate::Slot;"),
            ("slot.rs", "use std::sync::Arc;"),
        ] {
            weights.add_source(&Path::new("crates/store/src").join(file), source);
        }
        let (circles, share) = weights.circles();
        assert_eq!(circles, ["crates/store (2): index, index::page"]);
        assert!((share - 40.0).abs() < 0.1);
    }

    #[test]
    fn long_functions_are_found_by_their_braces() {
        let long = format!("impl Slot {{\n    pub fn open(&self) {{\n{}    }}\n}}\n", "        step();\n".repeat(99));
        let short = long.replacen("        step();\n", "", 1);
        assert_eq!(long_functions(&long), ["open"]);
        assert!(long_functions(&short).is_empty());
    }
}
