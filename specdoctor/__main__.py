from specdoctor.cli.app import main

main()
