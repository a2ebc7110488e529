//! Programs that scripts/setup installs for the tests.

use crate::world::skip;
use std::path::{Path, PathBuf};

/// A tool that scripts/setup installs; prints the reason if it is not there.
pub fn tool(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/bin").join(name);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::iter::once(own).chain(std::env::split_paths(&path).map(|dir| dir.join(name)));
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        skip(name, &format!("{name} is not installed (scripts/setup test does it)"));
    }
    found
}
