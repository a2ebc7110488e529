//! Output generated from the flag definitions: completions, man pages, the reference of flags and keys.

use crate::args::{OTHER_VARIABLES, env_name, is_switch};
use crate::cli::{self, CompletionsArgs, ManArgs};
use crate::config_file as file;
use clap::{Arg, Command};
use spurline_config::Fault;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

/// Prints the completions of a shell.
pub fn print_completions(args: CompletionsArgs) -> Result<(), Fault> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut without_hidden(&cli::cli_command()), "spurline", &mut text);
    print_text(&text)
}

/// A command with what `--help` shows, for completions: the generators offer hidden flags too.
fn without_hidden(command: &Command) -> Command {
    let mut shown = Command::new(command.get_name().to_owned());
    if let Some(version) = command.get_version() {
        shown = shown.version(version.to_owned());
    }
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    let args = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let subcommands = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    shown.args(args.cloned()).subcommands(subcommands.map(without_hidden))
}

/// Writes a man page per command.
pub fn write_man_pages(args: ManArgs) -> Result<(), Fault> {
    let mut command = cli::cli_command().disable_help_subcommand(true);
    command.build();
    write_man_page(&mut command, &args.dir).map_err(|e| {
        Fault::failed(
            format!("man pages into {}: {e}", args.dir.display()),
            "give a directory that exists and is writable",
        )
    })
}

fn write_man_page(command: &mut Command, dir: &Path) -> std::io::Result<()> {
    const SYNOPSIS: &str = ".SH SYNOPSIS\n";
    for sub in command.get_subcommands_mut().filter(|sub| !sub.is_hide_set()) {
        write_man_page(sub, dir)?;
    }
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").replace('\\', "\\e").replace('-', "\\-");
    let man = clap_mangen::Man::new(command.clone());
    let mut page = Vec::new();
    man.render(&mut page)?;
    let page = String::from_utf8_lossy(&page);
    // The generator's synopsis has every flag, and the arguments in another order.
    let page = match page.split_once(SYNOPSIS) {
        Some((head, rest)) => {
            let after = rest.find(".SH").map_or("", |at| &rest[at..]);
            let lines: Vec<&str> = usage.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            format!("{head}{SYNOPSIS}{}\n{after}", lines.join("\n.br\n"))
        }
        None => page.into_owned(),
    };
    std::fs::write(dir.join(man.get_filename()), page)
}

/// Prints the reference table.
pub fn config_reference() -> Result<(), Fault> {
    print_text(reference_text().as_bytes())
}

fn print_text(text: &[u8]) -> Result<(), Fault> {
    match std::io::stdout().write_all(text) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Fault::failed(format!("standard output: {e}"), "")),
        _ => Ok(()),
    }
}

/// A table for each service: flag, variable, default, meaning; the key is the flag without dashes.
fn reference_text() -> String {
    let mut out = String::new();
    for service in file::SERVICE_COMMANDS {
        let mut command = cli::cli_command();
        // Values and headings are filled in when the command is built.
        command.build();
        let Some(sub) = file::find_service(&command, service) else { continue };
        let title =
            if command.find_subcommand(service).is_some() { service.to_owned() } else { format!("k8s {service}") };
        let _ =
            writeln!(out, "## `spurline {title}`\n\n| flag, key | variable | default | meaning |\n|---|---|---|---|");
        let mut args: Vec<&Arg> =
            sub.get_arguments().filter(|arg| is_flag_of_reference(arg) && !arg.is_hide_set()).collect();
        args.sort_by_key(|arg| (heading_rank(sub, arg), arg.get_display_order()));
        let mut heading = "";
        for arg in args {
            let this = arg.get_help_heading().unwrap_or("General");
            if this != heading {
                let _ = writeln!(out, "| **{this}** | | | |");
                heading = this;
            }
            reference_row(&mut out, arg);
        }
        out.push('\n');
    }
    compatibility_table(&mut out);
    out
}

/// Whether a flag is the command's own.
fn is_flag_of_reference(arg: &Arg) -> bool {
    arg.get_long().is_some_and(|long| !matches!(long, "help" | "version"))
}

/// The flags and variables that are accepted and in no help: from other systems, and earlier names.
fn compatibility_table(out: &mut String) {
    out.push_str("## Accepted for compatibility\n\n");
    out.push_str("Flags of other systems, and earlier names. `--help` does not show them.\n\n");
    out.push_str("| flag, key or variable | commands | meaning |\n|---|---|---|\n");
    let mut rows: BTreeMap<(String, String), Vec<&str>> = BTreeMap::new();
    let command = cli::cli_command();
    for service in file::SERVICE_COMMANDS {
        let Some(sub) = file::find_service(&command, service) else { continue };
        for arg in sub.get_arguments().filter(|arg| is_flag_of_reference(arg)) {
            let long = arg.get_long().unwrap_or_default();
            let visible = arg.get_visible_aliases().unwrap_or_default();
            let hidden = arg.get_all_aliases().unwrap_or_default().into_iter().filter(|alias| !visible.contains(alias));
            for alias in hidden {
                rows.entry((format!("`--{alias}`"), format!("`--{long}`"))).or_default().push(service);
            }
            if arg.is_hide_set() {
                let meaning = arg.get_help().map(ToString::to_string).unwrap_or_default();
                rows.entry((format!("`--{long}`"), meaning)).or_default().push(service);
            }
            for (_, variable) in OTHER_VARIABLES.iter().filter(|(flag, _)| *flag == long) {
                rows.entry((format!("`{variable}`"), format!("`{}`", env_name(long)))).or_default().push(service);
            }
        }
    }
    for ((word, meaning), services) in rows {
        let _ = writeln!(out, "| {word} | {} | {meaning} |", services.join(", "));
    }
}

/// Headings in the order of the first flag.
fn heading_rank(sub: &Command, arg: &Arg) -> usize {
    sub.get_arguments().position(|a| a.get_help_heading() == arg.get_help_heading()).unwrap_or(usize::MAX)
}

fn reference_row(out: &mut String, arg: &Arg) {
    let long = arg.get_long().unwrap_or_default();
    let mut flag = format!("`--{long}`");
    if let Some(short) = arg.get_short() {
        let _ = write!(flag, ", `-{short}`");
    }
    for alias in arg.get_visible_aliases().unwrap_or_default() {
        let _ = write!(flag, ", `--{alias}`");
    }
    if let Some(names) = arg.get_value_names()
        && !is_switch(arg)
    {
        let _ = write!(flag, " {}", names.join(" "));
    }
    let env = arg.get_env().map(|e| format!("`{}`", e.to_string_lossy())).unwrap_or_default();
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    // A default that depends on the machine is part of the sentence.
    let (help, told) = match help.split_once(" [default: ") {
        Some((help, told)) => (help.to_owned(), Some(told.trim_end_matches(']').to_owned())),
        None => (help, None),
    };
    let default = match told {
        Some(told) => told,
        None if is_switch(arg) => "false".to_owned(),
        None => {
            let values: Vec<_> =
                arg.get_default_values().iter().map(|v| format!("`{}`", v.to_string_lossy())).collect();
            values.join(" ")
        }
    };
    let choices: Vec<_> = if is_switch(arg) {
        Vec::new()
    } else {
        arg.get_possible_values().iter().map(|v| format!("`{}`", v.get_name())).collect()
    };
    let choices = if choices.is_empty() { String::new() } else { format!(": {}", choices.join(", ")) };
    let _ =
        writeln!(out, "| {} | {env} | {default} | {}{choices} |", flag.replace('|', "\\|"), help.replace('|', "\\|"));
}
