//! Programs of others that are written in Go, which tests run. Deliberately does not know the build, which is
//! `scripts/go-program`.

use crate::skip;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The path that `scripts/go-program NAME` prints, built if not there yet. `None`, with a SKIP that `thing` in `SPURLINE_TEST_REQUIRE`
/// makes a failure, where the build fails.
pub fn go_program(name: &str, thing: &str) -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/go-program");
    let built = Command::new(script).arg(name).stderr(Stdio::inherit()).output();
    let path = built.ok().filter(|out| out.status.success()).and_then(|out| String::from_utf8(out.stdout).ok());
    if path.is_none() {
        skip(thing, &format!("{name} is not built ('scripts/go-program {name}' says why)"));
    }
    path.map(|path| PathBuf::from(path.trim()))
}
