//! How errors and warnings look: what is wrong, then what to do; coloured on a terminal only.

use anstyle::{AnsiColor, Style};
use spurline_config::Fault;
use std::process::ExitCode;

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default().bold();
const GREEN: Style = AnsiColor::Green.on_default().bold();

/// Prints an error and gives its exit code.
pub fn fault(fault: &Fault) -> ExitCode {
    anstream::eprintln!("{RED}error{RED:#}: {}", fault.what);
    if !fault.remedy.is_empty() {
        anstream::eprintln!("  {GREEN}fix{GREEN:#}: {}", fault.remedy);
    }
    ExitCode::from(fault.code as u8)
}

/// Prints warnings.
pub fn warnings(warnings: &[String]) {
    for warning in warnings {
        anstream::eprintln!("{YELLOW}warning{YELLOW:#}: {warning}");
    }
}
