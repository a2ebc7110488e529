//! Words of the command line, and the line of progress on a terminal. Knows no measurement.

use std::io::{IsTerminal as _, Write as _};

/// The word of a choice on the command line.
pub fn word_of(choice: &impl clap::ValueEnum) -> String {
    choice.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Shows progress: a line that is overwritten on a terminal, nothing elsewhere. No words clear the line.
pub fn show_progress(what: &str) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // A closed terminal needs no output.
        let _ = write!(err, "\r\x1b[K{what}");
        let _ = err.flush();
    }
}
