//! Asks the subnet manager of every port that the library knows, and prints what came back.

use spurline_umad::Umad;

fn main() {
    let umad = match Umad::open() {
        Ok(umad) => umad,
        Err(e) => return println!("{e}"),
    };
    for device in umad.devices() {
        for port in 1..=2 {
            let Ok(info) = umad.port(&device, port) else { continue };
            println!(
                "{device}/{port} state {} sm_lid {}: {:?}",
                info.state,
                info.sm_lid,
                umad.ask(&device, port, info.sm_lid)
            );
        }
    }
}
