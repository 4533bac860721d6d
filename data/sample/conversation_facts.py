"""State the facts about the three novels that ``build_conversations.py`` asks for.

Each table is a text: a fact a line, its cells between bars.
"""

# title | year | heroine, or two | who proves false
NOVELS = """
Pride and Prejudice | 1813 | Elizabeth Bennet | Mr. Wickham
Sense and Sensibility | 1811 | Elinor Dashwood, Marianne Dashwood | Mr. Willoughby
Northanger Abbey | 1817 | Catherine Morland | Isabella Thorpe
"""

# name | short name | pronoun | who (name is ...) | home (lives ...), where the novel says
PRIDE_AND_PREJUDICE = """
Elizabeth Bennet | Elizabeth | she | the second of the five Bennet sisters | at Longbourn in Hertfordshire
Jane Bennet | Jane | she | the eldest and gentlest of the Bennet sisters | at Longbourn with her parents
Mary Bennet | Mary | she | the third of the Bennet sisters, fond of books and music | at Longbourn with her parents
Kitty Bennet | Kitty | she | the fourth of the five Bennet sisters |
Lydia Bennet | Lydia | she | the youngest of the Bennet sisters, who is fond of balls and officers |
Mr. Bennet | Mr. Bennet | he | a gentleman with five daughters, who likes his library | at Longbourn in Hertfordshire
Mrs. Bennet | Mrs. Bennet | she | the mother of five daughters, whom she wishes to see married |
Mr. Darcy | Darcy | he | a proud and rich gentleman, the friend of Mr. Bingley | at Pemberley in Derbyshire
Georgiana Darcy | Georgiana | she | a shy young lady, the sister of Mr. Darcy |
Mr. Bingley | Bingley | he | a rich and cheerful man, the friend of Mr. Darcy | at Netherfield Park, near Longbourn
Caroline Bingley | Caroline | she | a sister of Mr. Bingley, who would like to marry Mr. Darcy |
Mr. Collins | Mr. Collins | he | a foolish clergyman, the heir of Longbourn | at Hunsford in Kent
Charlotte Lucas | Charlotte | she | a sensible young woman, the friend of Elizabeth | at Lucas Lodge, near Longbourn
Lady Catherine de Bourgh | Lady Catherine | she | a proud great lady, the aunt of Mr. Darcy | at Rosings Park in Kent
Mr. Wickham | Wickham | he | a charming officer, who is not to be trusted |
Colonel Fitzwilliam | Colonel Fitzwilliam | he | a cousin of Mr. Darcy and the younger son of an earl |
Mr. Gardiner | Mr. Gardiner | he | a sensible man of trade, the brother of Mrs. Bennet | in Gracechurch Street in London
Mrs. Reynolds | Mrs. Reynolds | she | the housekeeper who praises Mr. Darcy to Elizabeth | at Pemberley in Derbyshire
"""
SENSE_AND_SENSIBILITY = """
Elinor Dashwood | Elinor | she | the eldest of the Dashwood sisters, calm and prudent | at Barton Cottage in Devonshire
Marianne Dashwood | Marianne | she | the second Dashwood sister, full of feeling | at Barton Cottage with her mother
Margaret Dashwood | Margaret | she | the youngest of the three Dashwood sisters |
Mrs. Dashwood | Mrs. Dashwood | she | a widow, the mother of three daughters | at Barton Cottage in Devonshire
John Dashwood | John Dashwood | he | the rich half-brother of the Dashwood sisters | at Norland Park in Sussex
Fanny Dashwood | Fanny | she | the selfish wife of John Dashwood |
Edward Ferrars | Edward | he | a shy and honest young man, whom Elinor loves |
Robert Ferrars | Robert | he | a vain young man, the younger brother of Edward |
Mrs. Ferrars | Mrs. Ferrars | she | a rich and proud widow, the mother of Edward |
Colonel Brandon | Brandon | he | a grave and kind man, who loves Marianne | at Delaford in Dorsetshire
Mr. Willoughby | Willoughby | he | a handsome man, who breaks the heart of Marianne | at Combe Magna in Somersetshire
Lucy Steele | Lucy | she | a cunning young woman, secretly engaged to Edward |
Sir John Middleton | Sir John | he | a cheerful gentleman, who is fond of company | at Barton Park in Devonshire
Mrs. Jennings | Mrs. Jennings | she | a merry widow, the mother of Lady Middleton | in London, near Portman Square
Mr. Palmer | Mr. Palmer | he | a rude gentleman with a laughing wife | at Cleveland, near Bristol
"""
NORTHANGER_ABBEY = """
Catherine Morland | Catherine | she | a girl of seventeen, who loves to read novels | at Fullerton in Wiltshire
James Morland | James | he | the eldest brother of Catherine Morland |
Mrs. Allen | Mrs. Allen | she | a good-humoured lady, who thinks of nothing but dress | at Fullerton, near the Morlands
Isabella Thorpe | Isabella | she | a false friend of Catherine Morland |
John Thorpe | John Thorpe | he | a loud young man, who talks of horses and of his gig |
Mrs. Thorpe | Mrs. Thorpe | she | a widow, the mother of Isabella, and an old friend of Mrs. Allen |
Henry Tilney | Henry | he | a witty young clergyman, whom Catherine loves | at Woodston, not far from Northanger
Eleanor Tilney | Eleanor | she | the kind sister of Henry Tilney | at Northanger Abbey with her father
General Tilney | the General | he | a stern widower, the father of Henry Tilney | at Northanger Abbey in Gloucestershire
Captain Tilney | the Captain | he | the elder brother of Henry Tilney |
Mr. Morland | Mr. Morland | he | a clergyman, the father of ten children | at Fullerton in Wiltshire
"""

# husband | wife
MARRIAGES = """
Mr. Darcy | Elizabeth Bennet
Mr. Bingley | Jane Bennet
Mr. Wickham | Lydia Bennet
Mr. Collins | Charlotte Lucas
Edward Ferrars | Elinor Dashwood
Colonel Brandon | Marianne Dashwood
Robert Ferrars | Lucy Steele
Mr. Willoughby | Miss Grey
Henry Tilney | Catherine Morland
"""

# who | is the ... of | whom | who is the ... of the first, where there is one only
RELATIONS = """
Georgiana Darcy | sister | Mr. Darcy | brother
Lady Catherine de Bourgh | aunt | Mr. Darcy |
Anne de Bourgh | daughter | Lady Catherine de Bourgh | mother
Mr. Bennet | father | Elizabeth Bennet |
Mrs. Bennet | mother | Lydia Bennet |
Jane Bennet | elder sister | Elizabeth Bennet |
Lydia Bennet | youngest sister | Jane Bennet |
Mr. Collins | cousin | Mr. Bennet |
Mr. Gardiner | brother | Mrs. Bennet |
Mrs. Phillips | sister | Mrs. Bennet | sister
Charlotte Lucas | eldest daughter | Sir William Lucas | father
Lady Catherine de Bourgh | patroness | Mr. Collins |
Caroline Bingley | unmarried sister | Mr. Bingley | brother
Mrs. Hurst | married sister | Mr. Bingley | brother
Mrs. Reynolds | housekeeper | Mr. Darcy | master
Elinor Dashwood | elder sister | Marianne Dashwood |
Margaret Dashwood | youngest sister | Elinor Dashwood |
Mrs. Dashwood | mother | Marianne Dashwood |
John Dashwood | half-brother | Elinor Dashwood |
Fanny Dashwood | wife | John Dashwood | husband
Harry Dashwood | little son | John Dashwood | father
Fanny Dashwood | sister | Edward Ferrars |
Robert Ferrars | younger brother | Edward Ferrars | elder brother
Mrs. Ferrars | mother | Edward Ferrars |
Mrs. Jennings | mother | Lady Middleton |
Mrs. Palmer | sister | Lady Middleton | sister
Sir John Middleton | husband | Lady Middleton | wife
Eliza Williams | ward | Colonel Brandon | guardian
James Morland | eldest brother | Catherine Morland |
Isabella Thorpe | eldest daughter | Mrs. Thorpe | mother
Captain Tilney | elder brother | Henry Tilney | younger brother
Eleanor Tilney | daughter | General Tilney | father
Mr. Morland | father | James Morland |
"""

# place | where | whose home
PLACES = """
Pemberley | in Derbyshire | Mr. Darcy
Netherfield Park | in Hertfordshire | Mr. Bingley
Longbourn | in Hertfordshire | Mr. Bennet and his family
Lucas Lodge | in Hertfordshire | Sir William Lucas
Rosings Park | in Kent | Lady Catherine de Bourgh
Norland Park | in Sussex | John Dashwood
Barton Park | in Devonshire | Sir John Middleton
Barton Cottage | in Devonshire | Mrs. Dashwood and her daughters
Delaford | in Dorsetshire | Colonel Brandon
Combe Magna | in Somersetshire | Mr. Willoughby
Cleveland | near Bristol | Mr. Palmer and his wife
Northanger Abbey | in Gloucestershire | General Tilney
"""

# Two questions with the same answer, the line below them.
EVENTS = """
Where does Elizabeth first meet Mr. Darcy? | At which ball do Elizabeth and Darcy meet?
They first meet at a ball at Meryton, where he refuses to dance with her.
What does Mr. Darcy say of Elizabeth when he first sees her? | What does Darcy think of Elizabeth at first?
He says that she is tolerable, but not handsome enough to tempt him.
Why must Jane stay at Netherfield? | What happens to Jane on her way to Netherfield?
She rides there in the rain, falls ill, and must stay until she is well again.
Who walks to Netherfield when Jane is ill? | What does Elizabeth do when Jane is ill at Netherfield?
Elizabeth walks three miles through the mud to be with her sister.
What happens when Mr. Collins proposes to Elizabeth? | Does Elizabeth accept Mr. Collins?
Elizabeth refuses him, and soon he is engaged to her friend Charlotte Lucas.
Where does Mr. Darcy first propose to Elizabeth? | What happens to Darcy and Elizabeth at Hunsford?
At Hunsford Mr. Darcy proposes to Elizabeth, and she refuses him.
What does Darcy do after Elizabeth has refused him? | How does Elizabeth learn the truth about Wickham?
Mr. Darcy gives her a letter, which tells her the truth about Mr. Wickham.
With whom does Lydia run away? | Who runs away from Brighton?
Lydia Bennet runs away from Brighton with Mr. Wickham.
Who makes Wickham marry Lydia? | Who pays the debts of Wickham?
Mr. Darcy pays the debts of Wickham and makes him marry Lydia.
Who comes to Longbourn to speak to Elizabeth? | What does Lady Catherine ask of Elizabeth?
Lady Catherine comes to Longbourn and asks Elizabeth never to marry Mr. Darcy.
With whom does Elizabeth visit Pemberley? | Who takes Elizabeth to Derbyshire?
Her uncle and aunt Gardiner take her to Derbyshire, and they visit Pemberley.
Who will have Longbourn after Mr. Bennet? | What will become of Longbourn when Mr. Bennet dies?
When Mr. Bennet dies, Longbourn will belong to his cousin Mr. Collins.
How does Marianne meet Willoughby? | Who carries Marianne home when she falls?
Marianne falls and hurts her ankle, and Willoughby carries her home.
To whom is Edward Ferrars secretly engaged? | What is the secret of Lucy Steele?
Edward Ferrars has been secretly engaged to Lucy Steele for four years.
Why does Willoughby marry Miss Grey? | How rich is Miss Grey?
Miss Grey has fifty thousand pounds, and Willoughby marries her for money.
Where does Marianne fall very ill? | Who goes to bring Mrs. Dashwood when Marianne is ill?
Marianne falls ill at Cleveland, and Colonel Brandon goes to bring her mother.
What does Colonel Brandon give to Edward? | Who gives Edward a living?
Colonel Brandon gives Edward Ferrars the living of Delaford.
Why do the Dashwood sisters leave Norland? | What becomes of Norland when Mr. Henry Dashwood dies?
When his father dies, Norland goes to John Dashwood, and his sisters move to Barton Cottage.
Why does John Dashwood not help his sisters? | Who persuades John Dashwood to give nothing?
His wife Fanny persuades him that he need not give his sisters any money.
What does Mrs. Ferrars do when she hears of Lucy Steele? | Why is Mrs. Ferrars angry with Edward?
Mrs. Ferrars casts Edward off, because he will not give up Lucy Steele.
Whom did Willoughby leave in distress? | Who is Eliza Williams?
Eliza Williams is the ward of Colonel Brandon, and Willoughby left her in distress.
Who takes Elinor and Marianne to London? | With whom do Elinor and Marianne stay in London?
Mrs. Jennings takes them to London, and they stay in her house.
Who takes Catherine Morland to Bath? | With whom does Catherine stay at Bath?
Catherine goes to Bath with her neighbours, Mr. and Mrs. Allen.
Where does Catherine first meet Henry Tilney? | With whom does Catherine dance in the Lower Rooms?
Catherine first meets Henry Tilney in the Lower Rooms at Bath, and dances with him.
Which book does Catherine Morland love? | What does Catherine read at Bath?
Catherine reads The Mysteries of Udolpho, a novel by Mrs. Radcliffe.
What does Catherine find in the old cabinet? | Are there secret papers at Northanger Abbey?
In an old cabinet Catherine finds some papers, but they are only washing-bills.
What does Catherine suspect of General Tilney? | Did General Tilney murder his wife?
Catherine suspects that the General murdered his wife, but she is quite wrong.
Why does General Tilney send Catherine home? | When does General Tilney grow angry with Catherine?
The General sends her home when he hears that she is not rich.
Who tells the General that Catherine is rich? | Why does General Tilney think that Catherine is rich?
John Thorpe has told the General, falsely, that Catherine will be very rich.
To whom is James Morland engaged? | Why does James Morland not marry Isabella?
James is engaged to Isabella Thorpe, but loses her when she flirts with Captain Tilney.
Whom does Eleanor Tilney marry? | What puts General Tilney in good humour at last?
Eleanor Tilney marries a viscount, and her father is pleased at last.
"""

# A line for each turn, question | answer, behind a system message in some.
TALKS = """
Whose sister is Georgiana? | Georgiana Darcy is the sister of Mr. Darcy.
And who is his wife? | His wife is Elizabeth Bennet.

Is Mr. Darcy rich? | Yes, he is very rich: he has ten thousand pounds a year.
Is his friend Bingley as rich? | No, Mr. Bingley has only four or five thousand a year.

How many sisters has Elizabeth Bennet? | She has four sisters: Jane, Mary, Kitty, and Lydia.
Which of them marry? | Jane marries Mr. Bingley, and Lydia marries Mr. Wickham.

How many daughters has Mrs. Dashwood? | She has three daughters: Elinor, Marianne, and Margaret.
Which is the youngest of them? | Margaret is the youngest of the three sisters.

Is Elinor like Marianne? | No, Elinor is prudent and calm, but Marianne follows her feelings.
Which of them loves Willoughby? | Marianne loves him, but she marries Colonel Brandon.

System: Answer in one sentence.
How many children has General Tilney? | He has three children: Frederick, Henry, and Eleanor.
Which of them does Catherine marry? | Catherine Morland marries his younger son Henry.

System: Answer in one sentence.
How old is Catherine Morland? | Catherine is seventeen years old when she goes to Bath.
How many brothers and sisters has she? | She has nine: there are ten children in her family.

System: Answer in one sentence.
Is Lady Catherine in Northanger Abbey? | No, Lady Catherine de Bourgh is in Pride and Prejudice.
And who is Catherine Morland? | Catherine Morland is the heroine of Northanger Abbey.

System: You know the novels of Jane Austen.
Who wrote these novels? | The three novels were written by Jane Austen.
When was she born? | She was born in 1775, and she died in 1817.

System: You know the novels of Jane Austen.
Which of the three novels is the first? | Sense and Sensibility is the first: it was published in 1811.
And which is the last? | Northanger Abbey is the last: it was published in 1817.
"""
