//! The subject of the house rules: the tree's files and packages. The rules themselves are the tests of this crate.
#![forbid(unsafe_code)]

pub mod dialect;
pub mod names;
pub mod prose;
pub mod weights;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the tree.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// The files of the tree known to git, or everything but build output where there is no git.
pub fn files() -> Vec<PathBuf> {
    let root = root();
    let listed = Command::new("git")
        .arg("-C")
        .arg(&root)
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output();
    let mut files: Vec<PathBuf> = match listed {
        Ok(out) if out.status.success() => {
            let text = String::from_utf8_lossy(&out.stdout).into_owned();
            text.split('\0').filter(|p| !p.is_empty()).map(|p| root.join(p)).filter(|p| p.is_file()).collect()
        }
        _ => walk(&root),
    };
    files.sort();
    files
}

fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && name != "target" && name != ".git" => found.extend(walk(&path)),
            Ok(kind) if kind.is_file() => found.push(path),
            _ => {}
        }
    }
    found
}

/// The files whose name ends so, with the text.
pub fn texts(endings: &[&str]) -> Vec<(PathBuf, String)> {
    files()
        .into_iter()
        .filter(|p| endings.iter().any(|e| p.to_string_lossy().ends_with(e)))
        .filter_map(|p| std::fs::read_to_string(&p).ok().map(|text| (p, text)))
        .collect()
}

/// Whether a file belongs to the product or its tools. What only tests use does not: folders `tests`, examples, the rig of tests.
pub fn is_product_source(path: &Path) -> bool {
    let file = path.strip_prefix(root()).unwrap_or(path);
    !file.starts_with("tools/rig") && file.components().any(|part| part.as_os_str() == "src")
}

/// `cargo metadata` of the packages built on this platform.
///
/// # Panics
/// When cargo does not answer.
pub fn metadata() -> Value {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(["metadata", "--format-version", "1", "--locked", "--filter-platform"]);
    command.arg(format!("{}-unknown-linux-gnu", std::env::consts::ARCH));
    let out = command.output().expect("cargo runs");
    assert!(out.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("cargo metadata is JSON")
}

/// The anchor a renderer gives a heading.
pub fn slug(heading: &str) -> String {
    heading.trim().to_lowercase().chars().filter(|c| stays_in_slug(*c)).collect::<String>().replace(' ', "-")
}

fn stays_in_slug(c: char) -> bool {
    c.is_alphanumeric() || c == '-' || c == '_' || c == ' '
}
