//! Queries the subnet manager of every port that the library knows, and prints the responses.

use spurline_umad::Umad;

fn main() {
    let umad = match Umad::open() {
        Ok(umad) => umad,
        Err(e) => return println!("{e}"),
    };
    for device in umad.devices() {
        for port in 1..=2 {
            let Ok(info) = umad.port_info(&device, port) else { continue };
            println!(
                "{device}/{port} state {} sm_lid {}: {:?}",
                info.state,
                info.sm_lid,
                umad.query_sm(&device, port, info.sm_lid)
            );
        }
    }
}
