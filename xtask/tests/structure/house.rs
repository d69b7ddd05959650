//! Figures of the whole tree, which `cargo xtask house` prints: how it is divided, and what its
//! functions look like.
//!
//! Each figure has a bound, so that a change makes none of them worse, and a goal. A figure that
//! becomes better gets a new bound.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::project::{WorkspaceCrate, packages, relative, root, sources};
use crate::read;

/// The folders of crates that are no part of the product.
const TOOLS: [&str; 4] = ["bench", "testkit", "xtask", "fuzz"];

/// The folders whose functions check their invariants.
const CHECKED: [&str; 6] = [
    "backends/uhs",
    "ring",
    "connection",
    "frontends/socket",
    "frontends/shared",
    "session/src/workers",
];

/// A figure with its bound and its goal.
struct TreeFigure {
    name: &'static str,
    value: f64,
    /// The figure may not become worse than this.
    bound: f64,
    goal: f64,
    /// Larger values are better.
    grows: bool,
}

impl TreeFigure {
    fn is_within(&self) -> bool {
        if self.grows { self.value >= self.bound } else { self.value <= self.bound }
    }
}

/// A source file of the product, without its tests.
#[derive(Default)]
struct SourceFigures {
    lines: usize,
    functions: usize,
    long_functions: usize,
    parameters: usize,
    tuple_parameters: usize,
    asserts: usize,
    /// Modules with tests only.
    test_modules: BTreeSet<String>,
    uses: Vec<UsedPath>,
    /// Names that the file gives to others from its submodules, with their paths.
    exports: BTreeMap<String, Vec<String>>,
    test_lines: usize,
}

/// A path from the modules of the crate.
struct UsedPath(Vec<String>);

fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg") && {
                let mut of_tests = false;
                let _ = attribute.parse_nested_meta(|meta| {
                    of_tests |= meta.path.is_ident("test");
                    Ok(())
                });
                of_tests
            }
    })
}

fn lines(span: Span) -> usize {
    span.end().line - span.start().line + 1
}

impl SourceFigures {
    fn function(&mut self, signature: &syn::Signature, whole: Span) {
        self.functions += 1;
        self.long_functions += usize::from(lines(whole) > 70);
        for input in &signature.inputs {
            if let syn::FnArg::Typed(typed) = input {
                self.parameters += 1;
                self.tuple_parameters += usize::from(matches!(*typed.ty, syn::Type::Tuple(_)));
            }
        }
    }

    fn skip(&mut self, attributes: &[syn::Attribute], whole: Span) -> bool {
        let skips = is_test_only(attributes);
        if skips {
            self.test_lines += lines(whole);
        }
        skips
    }

    /// Adds the paths of a `use`.
    fn add_tree(&mut self, tree: &syn::UseTree, mut path: Vec<String>, exports: bool) {
        match tree {
            syn::UseTree::Path(inner) => {
                path.push(inner.ident.to_string());
                self.add_tree(&inner.tree, path, exports);
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|item| self.add_tree(item, path.clone(), exports));
            }
            syn::UseTree::Name(name) => {
                let name = name.ident.to_string();
                path.push(name.clone());
                self.add_path(path, exports.then_some(name));
            }
            syn::UseTree::Rename(rename) => {
                path.push(rename.ident.to_string());
                self.add_path(path, exports.then_some(rename.rename.to_string()));
            }
            syn::UseTree::Glob(_) => self.add_path(path, None),
        }
    }

    fn add_path(&mut self, path: Vec<String>, export: Option<String>) {
        match export {
            Some(name) => drop(self.exports.insert(name, path)),
            None => self.uses.push(UsedPath(path)),
        }
    }
}

impl<'ast> Visit<'ast> for SourceFigures {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if self.skip(&item.attrs, item.span()) {
            self.test_modules.insert(item.ident.to_string());
        } else {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !self.skip(&item.attrs, item.span()) {
            self.function(&item.sig, item.span());
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !self.skip(&item.attrs, item.span()) {
            self.function(&item.sig, item.span());
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !self.skip(&item.attrs, item.span()) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if item.default.is_some() {
            self.function(&item.sig, item.span());
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        let name = called.path.segments.last().map(|last| last.ident.to_string());
        let name = name.unwrap_or_default();
        self.asserts += usize::from(name.starts_with("assert") || name.starts_with("debug_assert"));
        visit::visit_macro(self, called);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !self.skip(&item.attrs, item.span()) {
            let exports = !matches!(item.vis, syn::Visibility::Inherited);
            self.add_tree(&item.tree, Vec::new(), exports);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let words: Vec<String> = path.segments.iter().map(|one| one.ident.to_string()).collect();
        if matches!(words[0].as_str(), "crate" | "super" | "self") && words.len() > 1 {
            self.uses.push(UsedPath(words));
        }
        visit::visit_path(self, path);
    }
}

/// The source files of one crate, by the path of their module.
struct CrateModules(BTreeMap<Vec<String>, (PathBuf, SourceFigures)>);

impl CrateModules {
    /// Reads the files below the root of a target, without modules of tests.
    fn read(file: &Path) -> CrateModules {
        let mut modules = CrateModules(BTreeMap::new());
        modules.add(file, Vec::new());
        modules
    }

    fn add(&mut self, file: &Path, module: Vec<String>) {
        let text = read(file);
        let parsed = syn::parse_file(&text);
        let parsed = parsed.unwrap_or_else(|error| panic!("{}: {error}", relative(file)));
        let mut figures = SourceFigures { lines: text.lines().count(), ..SourceFigures::default() };
        figures.visit_file(&parsed);
        let below = |item: &syn::Item| match item {
            syn::Item::Mod(inner) if inner.content.is_none() && !is_test_only(&inner.attrs) => {
                Some(inner.ident.to_string())
            }
            _ => None,
        };
        let children: Vec<String> = parsed.items.iter().filter_map(below).collect();
        self.0.insert(module.clone(), (file.to_owned(), figures));
        let stem = file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let stem = stem.unwrap_or_default();
        let is_folder = module.is_empty() || stem == "mod";
        let folder = file.parent().unwrap_or(Path::new(""));
        let folder = if is_folder { folder.to_owned() } else { folder.join(&stem) };
        for child in children {
            let found = [folder.join(format!("{child}.rs")), folder.join(&child).join("mod.rs")];
            let Some(found) = found.into_iter().find(|path| path.exists()) else { continue };
            let mut path = module.clone();
            path.push(child);
            self.add(&found, path);
        }
    }

    /// The module that a path of `from` leads to, and not only through.
    fn target(&self, from: &[String], path: &[String], depth: usize) -> Option<Vec<String>> {
        let (mut module, mut rest) = (from.to_vec(), path);
        match path.first()?.as_str() {
            "crate" => (module, rest) = (Vec::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {}
            first => {
                module.push(first.to_owned());
                if !self.0.contains_key(&module) {
                    return None;
                }
                rest = &path[1..];
            }
        }
        while rest.first().is_some_and(|word| word == "super") {
            module.pop()?;
            rest = &rest[1..];
        }
        while let Some(word) = rest.first() {
            let mut next = module.clone();
            next.push(word.clone());
            if self.0.contains_key(&next) {
                (module, rest) = (next, &rest[1..]);
                continue;
            }
            // The name may come from a module below.
            let exported = self.0.get(&module)?.1.exports.get(word).filter(|_| depth < 5);
            return match exported {
                Some(path) => self.target(&module, path, depth + 1),
                None => Some(module),
            };
        }
        Some(module)
    }

    /// The files of the largest circle of uses.
    fn largest_circle(&self) -> Vec<String> {
        let names: Vec<&Vec<String>> = self.0.keys().collect();
        let edges: Vec<Vec<usize>> = names
            .iter()
            .map(|module| {
                let uses = self.0[*module].1.uses.iter();
                let targets = uses.filter_map(|UsedPath(path)| self.target(module, path, 0));
                let targets: BTreeSet<Vec<String>> =
                    targets.filter(|target| target != *module).collect();
                targets.iter().filter_map(|target| names.binary_search(&target).ok()).collect()
            })
            .collect();
        let reached: Vec<BTreeSet<usize>> = (0..names.len()).map(|at| reach(&edges, at)).collect();
        let circle = |at: usize| -> Vec<usize> {
            reached[at].iter().copied().filter(|other| reached[*other].contains(&at)).collect()
        };
        let largest = (0..names.len()).map(circle).max_by_key(Vec::len).unwrap_or_default();
        largest.into_iter().map(|at| relative(&self.0[names[at]].0)).collect()
    }
}

/// The nodes that `from` leads to.
fn reach(edges: &[Vec<usize>], from: usize) -> BTreeSet<usize> {
    let (mut found, mut left) = (BTreeSet::new(), edges[from].clone());
    while let Some(at) = left.pop() {
        if found.insert(at) {
            left.extend(&edges[at]);
        }
    }
    found
}

/// The crates of the workspace that the manifest of `name` names for its program.
fn count_named(crates: &[WorkspaceCrate], name: &str) -> usize {
    let this = crates.iter().find(|this| this.name == name);
    let needed = this.iter().flat_map(|this| &this.dependencies);
    let is_ours = |name: &str| crates.iter().any(|other| other.name == name);
    needed.filter(|needed| needed.kind == "normal" && is_ours(&needed.name)).count()
}

fn figures() -> Vec<TreeFigure> {
    let crates = packages();
    let is_tool = |folder: &str| TOOLS.iter().any(|tool| folder.split('/').next() == Some(tool));
    let mut product: Vec<(String, SourceFigures)> = Vec::new();
    let mut circle: Vec<String> = Vec::new();
    for this in crates.iter().filter(|this| !is_tool(&this.folder)) {
        let kinds = ["lib", "rlib", "cdylib", "staticlib", "bin", "proc-macro"];
        for target in this.roots.iter().filter(|root| kinds.contains(&root.kind.as_str())) {
            let modules = CrateModules::read(&target.file);
            let here = modules.largest_circle();
            circle = if here.len() > circle.len() { here } else { circle };
            let files = modules.0.into_values();
            product.extend(files.map(|(file, figures)| (relative(&file), figures)));
        }
    }
    let all: usize = sources().iter().map(|file| read(file).lines().count()).sum();
    let sum = |count: &dyn Fn(&SourceFigures) -> usize| -> f64 {
        product.iter().map(|(_, figures)| count(figures)).sum::<usize>() as f64
    };
    let checked = |count: &dyn Fn(&SourceFigures) -> usize| -> f64 {
        let checked =
            product.iter().filter(|(file, _)| CHECKED.iter().any(|one| file.starts_with(one)));
        checked.map(|(_, figures)| count(figures)).sum::<usize>() as f64
    };
    println!("largest circle: {}", circle.join(" "));
    let share = |part: f64, whole: f64| 100.0 * part / whole;
    let functions = sum(&|file| file.functions);
    let smaller = |name, value, bound, goal| TreeFigure { name, value, bound, goal, grows: false };
    vec![
        smaller("lines of Rust", all as f64, 293_500.0, 190_000.0),
        smaller(
            "lines of the product without tests",
            sum(&|file| file.lines.saturating_sub(file.test_lines)),
            166_500.0,
            110_000.0,
        ),
        smaller(
            "functions over 70 lines, %",
            share(sum(&|file| file.long_functions), functions),
            0.15,
            0.1,
        ),
        smaller(
            "tuple parameters, %",
            share(sum(&|file| file.tuple_parameters), sum(&|file| file.parameters)),
            2.5,
            0.3,
        ),
        smaller("largest circle of files in a crate", circle.len() as f64, 12.0, 4.0),
        smaller("crates that the program names", count_named(&crates, "defuse") as f64, 19.0, 14.0),
        TreeFigure {
            name: "assertions a function (uhs, ring, served side, workers)",
            value: checked(&|file| file.asserts) / checked(&|file| file.functions),
            bound: 0.05,
            goal: 0.15,
            grows: true,
        },
    ]
}

/// With `--nocapture`, prints the figures.
#[test]
fn no_figure_of_the_tree_is_worse_than_its_bound() {
    assert!(root().is_dir());
    println!("{:<58} {:>10} {:>10} {:>10}", "", "now", "bound", "goal");
    let figures = figures();
    for TreeFigure { name, value, bound, goal, .. } in &figures {
        let digits = if *goal < 1.0 { 3 } else { 0 };
        println!("{name:<58} {value:>10.digits$} {bound:>10.digits$} {goal:>10.digits$}");
    }
    let worse: Vec<String> = figures
        .iter()
        .filter(|figure| !figure.is_within())
        .map(|figure| {
            format!("{}: {:.3} is worse than {}", figure.name, figure.value, figure.bound)
        })
        .collect();
    super::complain(worse);
}
