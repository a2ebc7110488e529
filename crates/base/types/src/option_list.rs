//! Lists of mount options, as after `-o`, in /etc/fstab and in volumes. Knows no effect of an option.

/// The options with SELinux labels, whose values may have commas.
pub const LABEL_OPTIONS: [&str; 4] = ["context", "fscontext", "defcontext", "rootcontext"];

/// The options of a list, without empty options. A comma behind a backslash is part of a value, and so is every comma of a value
/// in double quotes, as mount(8) writes SELinux labels. That backslash and these quotes are removed.
pub fn split_option_list(list: &str) -> Vec<String> {
    let mut options = Vec::new();
    let mut option = String::new();
    let mut rest = list;
    while let Some(next) = rest.chars().next() {
        rest = &rest[next.len_utf8()..];
        match next {
            ',' => options.push(std::mem::take(&mut option)),
            '\\' if rest.starts_with(',') => {
                option.push(',');
                rest = &rest[1..];
            }
            '=' => {
                option.push('=');
                if let Some((value, behind)) = quoted_value(rest) {
                    option.push_str(value);
                    rest = behind;
                }
            }
            other => option.push(other),
        }
    }
    options.push(option);
    options.iter().map(|option| option.trim().to_owned()).filter(|option| !option.is_empty()).collect()
}

/// A value in double quotes at the beginning of `text`, and the text behind; the quotes have to enclose the whole value.
fn quoted_value(text: &str) -> Option<(&str, &str)> {
    let (value, behind) = text.strip_prefix('"')?.split_once('"')?;
    (behind.is_empty() || behind.starts_with(',')).then_some((value, behind))
}

/// An option as a list with a single element.
pub fn escape_option(option: &str) -> String {
    option.replace(',', "\\,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_values_are_escaped_or_quoted() {
        let label = "system_u:object_r:t:s0:c127,c456";
        let list = format!("ro, fsname=a\\,b,,context=\"{label}\",rootcontext={},x=\"a,b", label.replace(',', "\\,"));
        let split = split_option_list(&list);
        let wanted = ["ro", "fsname=a,b", &format!("context={label}"), &format!("rootcontext={label}"), "x=\"a", "b"];
        assert_eq!(split, wanted);
        // Other backslashes and quotes are part of a value.
        assert_eq!(split_option_list("a=\\040,b=\"x\"y"), ["a=\\040", "b=\"x\"y"]);
        assert_eq!(split_option_list(""), [""; 0]);
    }

    #[test]
    fn an_escaped_option_is_one_option() {
        for option in ["ro", "context=a,b", "registry=static:a:1,b:2", "a=\"b,c"] {
            assert_eq!(split_option_list(&escape_option(option)), [option]);
        }
    }
}
